"""Trains the tiny model, exports it and checks it, in one command of less than ten minutes on one large GPU.

    python book/tiny/train.py SOURCES MODEL OUT [--tokens 420e6] [--budget-s 560]

SOURCES is the folder of `sources.py`, MODEL holds the tokenizer's files, OUT gets the checkpoint and its report,
`tiny-training.json`.

Rows of 512 tokens, the last tenth of the way rows of 2,048; AdamW with warm-up and a cosine; float32 weights, bfloat16
arithmetic. How far the training has come is the share of its tokens or of its time, whichever is larger: on a slow
machine the learning rate still comes down in time and the export surely happens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from corpus import VOCAB_SIZE, start_rows
from gates import Writer, measure, missed
from network import CONFIG, Qwen3
from safetensors.torch import save_file

SEED = 1775
BATCH_TOKENS = 128 * 1024
PEAK_LR, BETAS, WEIGHT_DECAY, CLIP, WARM_UP = 3e-3, (0.9, 0.95), 0.1, 1.0, 0.03
LONG = 0.9  # from here on rows are 2,048 tokens long
LENGTHS = (512, 2048)


def driver_version() -> str:
    """The version of the GPU's driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]


def learning_rate(progress: float) -> float:
    """The learning rate at a share of the way: a short rise, then half a cosine down to a hundredth."""
    if progress < WARM_UP:
        return PEAK_LR * max(progress / WARM_UP, 0.01)
    turn = (progress - WARM_UP) / (1 - WARM_UP)
    return PEAK_LR * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * turn)))


def optimizer_for(model: torch.nn.Module, fused: bool) -> torch.optim.AdamW:
    """AdamW that decays the matrices and leaves the norms alone."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=BETAS, eps=1e-10, fused=fused)


def export(model: Qwen3, tokenizer: Path, out: Path) -> None:
    """Writes the checkpoint in bfloat16 with its configuration; the tokenizer's files are copied."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in model.state_dict().items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    generation = {"bos_token_id": None, "eos_token_id": [2, 0], "pad_token_id": 0}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if tokenizer.resolve() != out.resolve():
            shutil.copy(tokenizer / name, out / name)


def backward_for(model: Qwen3, batch_tokens: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward and backward pass of a batch of rows, compiled for both lengths on a GPU; it returns the loss."""
    device = model.cos.device
    on_gpu = device.type == "cuda"
    loss_of = torch.compile(model.loss, dynamic=False) if on_gpu else model.loss

    def backward(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = loss_of(batch.long())
        loss.backward()
        return loss.detach()

    for length in LENGTHS if on_gpu else ():
        noise = torch.randint(VOCAB_SIZE, (batch_tokens // length, length + 1), dtype=torch.int16, device=device)
        backward(noise).item()
        model.zero_grad(set_to_none=True)
    return backward


def train(
    model: Qwen3,
    backward: Callable[[torch.Tensor], torch.Tensor],
    data: dict[int, torch.Tensor],
    args: argparse.Namespace,
    deadline: float,
) -> dict:
    """Trains on rows `[rows, length + 1]` for each length until the tokens or the time are spent."""
    device = model.cos.device
    optimizer = optimizer_for(model, fused=device.type == "cuda")
    begun, spent, step = time.monotonic(), 0, 0
    budget = deadline - begun
    losses: list[torch.Tensor] = []
    curve: list[dict] = []
    order = {length: torch.empty(0, dtype=torch.long, device=device) for length in LENGTHS}
    print(f"training for {args.tokens / 1e6:.0f}M tokens or {budget:.0f} s", flush=True)
    while (progress := max(spent / args.tokens, (time.monotonic() - begun) / budget)) < 1:
        length = LENGTHS[progress >= LONG]
        size = args.batch_tokens // length
        if len(order[length]) < size:
            order[length] = torch.randperm(len(data[length]), device=device)
        chosen, order[length] = order[length][:size], order[length][size:]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        losses.append(backward(data[length][chosen]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, spent = step + 1, spent + size * length
        if step % args.report == 0:
            loss, losses = float(torch.stack(losses).mean()), []
            took = time.monotonic() - begun
            curve.append(
                {
                    "tokens": spent,
                    "loss": round(loss, 4),
                    "lr": round(learning_rate(progress), 6),
                    "seconds": round(took, 1),
                }
            )
            print(
                f"step {step} {progress:.3f} loss {loss:.4f} {spent / took / 1e6:.3f}M tokens/s {took:.0f} s",
                flush=True,
            )
    took = time.monotonic() - begun
    return {
        "steps": step,
        "tokens": spent,
        "seconds": round(took, 1),
        "tokens_per_s": round(spent / took),
        "curve": curve,
    }


def main() -> int:
    """Makes the rows, trains, exports, checks; 0 when every gate is passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=float, default=420e6, help="tokens to train on")
    parser.add_argument("--unique", type=float, default=170e6, help="tokens to make; they are read again when used up")
    parser.add_argument("--budget-s", type=float, default=560.0, help="seconds for everything")
    parser.add_argument("--gates-s", type=float, default=60.0, help="seconds kept for export and gates")
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS)
    parser.add_argument("--report", type=int, default=50, help="steps between two points of the loss curve")
    parser.add_argument("--stories", type=int, default=441, help="prompts of each kind for the gates")
    args = parser.parse_args()
    start = time.monotonic()

    # The rows are made by other processes while this one compiles; they start before it touches the GPU.
    with multiprocessing.get_context("fork").Pool(max(1, (os.cpu_count() or 1) - 3)) as pool:
        coming = {}
        for length, part in zip(LENGTHS, (LONG, 1 - LONG), strict=True):
            count = max(int(args.unique * part) // (length + 1), args.batch_tokens // length)
            coming[length] = start_rows(pool, SEED + length, count, length + 1, args.sources, args.model)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(SEED)
        torch.set_float32_matmul_precision("high")
        model = Qwen3(CONFIG).to(device)
        backward = backward_for(model, args.batch_tokens)
        print(f"compiled, {time.monotonic() - start:.0f} s", flush=True)
        data = {}
        for length in LENGTHS:
            array = np.concatenate(coming[length].get())
            data[length] = torch.from_numpy(array.astype(np.int16)).to(device)
            print(f"{array.size / 1e6:.1f}M tokens in rows of {length}, {time.monotonic() - start:.0f} s", flush=True)
    report = train(model, backward, data, args, start + args.budget_s - args.gates_s)
    export(model, args.model, args.out)
    print(f"exported, {time.monotonic() - start:.0f} s", flush=True)
    del data
    gates, samples = measure(
        Writer(args.out, device.type, torch.bfloat16), stories=args.stories, sums=min(args.stories, 441)
    )
    report = {
        "what": "training of the bundled model",
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(["book/tiny/train.py", "SOURCES", "minisgl/tiny", "OUT", *sys.argv[4:]]),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": torch.version.cuda,
            "driver": driver_version() if device.type == "cuda" else None,
        },
        "seed": SEED,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds_in_all": round(time.monotonic() - start, 1),
        **report,
        "gates": gates,
        "missed": missed(gates),
        "samples": samples,
        "remarks": [],
    }
    curve = ",\n  ".join(json.dumps(point) for point in report["curve"])
    text = json.dumps(report | {"curve": "@"}, indent=1).replace('"@"', f"[\n  {curve}\n ]")
    (args.out / "tiny-training.json").write_text(text + "\n")
    print(
        json.dumps(
            {key: report[key] for key in ("gates", "missed", "samples", "tokens_per_s", "seconds_in_all")}, indent=1
        )
    )
    return 1 if missed(gates) else 0


if __name__ == "__main__":
    sys.exit(main())
