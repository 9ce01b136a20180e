"""Models against transformers on random tiny checkpoints: logits, weights and their errors, rotary tables, ranks."""

from __future__ import annotations

import ctypes
import gc
import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from builders import make_batch, make_pages
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minisgl.config import ModelConfig
from minisgl.engine.attention.torch_backend import TorchAttention
from minisgl.kernels.kernel_set import PLAIN
from minisgl.kernels.norm import rms_norm
from minisgl.model import CausalLM, TensorParallel, load_model
from minisgl.model.rotary import RotaryEmbedding

PAGE_SIZE = 4
TINY = dict(
    vocab_size=150,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    initializer_range=0.2,
)


def save_tiny(folder: Path, config_class: type = Qwen3Config, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random checkpoint in ``folder`` and the transformers model that it came from."""
    config = config_class(**{**TINY, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):  # not ones and zeros: those would hide a mix-up
            torch.nn.init.normal_(parameter, mean=0.5, std=0.2)
    model.save_pretrained(folder)
    return model


def load(folder: Path, **options: object) -> CausalLM:
    return load_model(ModelConfig.from_folder(folder), folder, **options)


def run(model: CausalLM, texts: list[list[int]], cuts: list[list[int]]) -> list[Tensor]:
    """Logits ``[len, vocab]`` of each text; text i is computed in pieces that end at ``cuts[i]``, one a step."""
    pages = make_pages(len(texts), seed=3)
    num_pages = 1 + sum(map(len, pages))
    attention = TorchAttention()
    kv_layers = [torch.full(model.kv_shape(num_pages, PAGE_SIZE), float("nan")) for _ in model.model.layers]
    logits: list[list[Tensor]] = [[] for _ in texts]
    for step in range(max(map(len, cuts))):
        now = [i for i, ends in enumerate(cuts) if step < len(ends)]
        starts = [cuts[i][step - 1] if step else 0 for i in now]
        pieces = [texts[i][start : cuts[i][step]] for i, start in zip(now, starts, strict=True)]
        batch = make_batch(
            pieces, computed=starts, pages=[pages[i] for i in now], page_size=PAGE_SIZE, attention=attention
        )
        with torch.inference_mode():
            hidden = model(batch, kv_layers, attention)
            parts = model.logits(hidden[batch.logits_indices]).split(list(map(len, pieces)))
        for i, part in zip(now, parts, strict=True):
            logits[i].append(part)
    return [torch.cat(parts) for parts in logits]


def random_texts(lengths: tuple[int, ...] = (11, 1, 14), seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, TINY["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def expected(model: PreTrainedModel, texts: list[list[int]]) -> list[Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([text])).logits[0] for text in texts]


def cut(texts: list[list[int]], size: int) -> list[list[int]]:
    return [[*range(size, len(text), size), len(text)] for text in texts]


def assert_same_logits(model: CausalLM, reference: PreTrainedModel, sizes: tuple[int, ...] = (100, 5, 1)) -> None:
    """As one prefill, in chunks, and token by token; all texts in one batch, on scattered pages."""
    texts = random_texts()
    want = expected(reference, texts)
    for size in sizes:
        for got, right in zip(run(model, texts, cut(texts, size)), want, strict=True):
            torch.testing.assert_close(got, right, atol=1e-4, rtol=0)


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
CHECKPOINTS: dict[str, tuple[type, dict[str, object]]] = {
    "qwen3_tied": (Qwen3Config, dict(tie_word_embeddings=True)),
    "qwen3_untied": (Qwen3Config, dict(tie_word_embeddings=False)),
    "qwen3_one_kv_head": (Qwen3Config, dict(num_key_value_heads=1)),
    "qwen3_as_many_kv_heads": (Qwen3Config, dict(num_key_value_heads=4)),
    "qwen3_three_to_one": (Qwen3Config, dict(num_attention_heads=6, num_key_value_heads=2)),
    "qwen3_M13_head_dim_80": (Qwen3Config, dict(head_dim=80)),
    "qwen3_M07_bias": (Qwen3Config, dict(attention_bias=True)),
    "llama": (LlamaConfig, dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4, **LLAMA3))),
    "llama_M07_attention_bias": (LlamaConfig, dict(attention_bias=True, tie_word_embeddings=True)),
    "llama_M07_mlp_bias": (LlamaConfig, dict(mlp_bias=True)),
    "qwen2": (Qwen2Config, dict(head_dim=16)),
    "mistral_M13_head_dim_24": (MistralConfig, dict(head_dim=24, sliding_window=None)),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    config_class, changes = CHECKPOINTS[name]
    reference = save_tiny(tmp_path, config_class, **changes)
    assert_same_logits(load(tmp_path), reference)


@pytest.mark.parametrize("handed_on", [True, False])
def test_the_next_norm_is_handed_on(tmp_path: Path, handed_on: bool) -> None:
    """What a product makes for the next reader is what that one's own norm gives; and without it all is the same."""
    layers, seen = 3, []

    def linear_add(*args: Any) -> Tensor | None:
        normed = PLAIN.linear_add(*args)
        return normed if handed_on else None

    def noted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, norm_weight: Tensor, eps: float, *rest: Any) -> Tensor:
            normed = rest[-1]
            assert normed is None or torch.equal(normed, rms_norm(x, norm_weight, eps))
            seen.append(normed is not None)
            return function(x, norm_weight, eps, *rest)

        return call

    kernels = replace(
        PLAIN, linear_add=linear_add, norm_linear=noted(PLAIN.norm_linear),
        norm_linear_silu=noted(PLAIN.norm_linear_silu),
    )  # fmt: skip
    reference = save_tiny(tmp_path, num_hidden_layers=layers)
    assert_same_logits(load(tmp_path, kernels=kernels), reference, sizes=(100,))
    # Into a layer go two of them; the embedding has made no norm, and the head makes its own.
    assert seen == [False, *[handed_on] * (2 * layers - 1), False]


def test_chunks_of_uneven_size_beside_each_other(tmp_path: Path) -> None:
    """One request decodes while another prefills: each must see its own tokens only."""
    reference, texts = save_tiny(tmp_path), random_texts((17, 9, 21))
    got = run(load(tmp_path), texts, [[15, 16, 17], [9], [4, 20, 21]])
    for logits, right in zip(got, expected(reference, texts), strict=True):
        torch.testing.assert_close(logits, right, atol=1e-4, rtol=0)


def test_E14_two_models_in_one_process(tmp_path: Path) -> None:
    """Different in every size, called in turns: nothing is shared between them."""
    folders = tmp_path / "a", tmp_path / "b"
    references = save_tiny(folders[0], head_dim=80), save_tiny(folders[1], hidden_size=32, num_hidden_layers=3, seed=5)
    models = [load(folder) for folder in folders]
    for model, reference in [*zip(models, references, strict=True)] * 2:
        assert_same_logits(model, reference, sizes=(5,))


def test_E12_dtypes_are_converted_on_load(tmp_path: Path) -> None:
    """A bfloat16 checkpoint in float32 computes with exactly its values; in bfloat16 everything is bfloat16."""
    save_tiny(tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    assert ModelConfig.from_folder(tmp_path).dtype == "bfloat16"
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(load(tmp_path), reference, sizes=(100,))
    half = load(tmp_path, dtype=torch.bfloat16)
    assert {t.dtype for t in [*half.parameters(), *half.buffers()]} == {torch.bfloat16}


def test_bfloat16_logits_near_transformers(tmp_path: Path) -> None:
    """E12: the whole path in bfloat16, no further from float32 than transformers' own bfloat16 is."""
    reference = save_tiny(tmp_path)
    texts = random_texts((24,))
    right = expected(reference, texts)[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model, attention = load(tmp_path, dtype=torch.bfloat16), TorchAttention()
    kv_layers = [torch.zeros(model.kv_shape(9, PAGE_SIZE), dtype=torch.bfloat16) for _ in range(2)]
    with torch.inference_mode():
        ours = model.logits(model(make_batch(texts, attention=attention), kv_layers, attention))
    assert ours.dtype == torch.bfloat16
    error, their_error = ((x.float() - right).abs().mean() for x in (ours, expected(theirs, texts)[0]))
    assert 0 < error < 1.25 * their_error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_equals_cpu(tmp_path: Path) -> None:
    reference, texts = save_tiny(tmp_path, head_dim=80), random_texts((24,))
    model, attention = load(tmp_path, device="cuda"), TorchAttention()
    kv_layers = [torch.zeros(model.kv_shape(9, PAGE_SIZE), device="cuda") for _ in range(2)]
    batch = make_batch(texts, device="cuda", attention=attention)
    with torch.inference_mode():
        got = model.logits(model(batch, kv_layers, attention)).cpu()
    torch.testing.assert_close(got, expected(reference, texts)[0], atol=1e-3, rtol=1e-3)


# What is not supported


def config_of(**changes: object) -> ModelConfig:
    raw = {**TINY, "architectures": ["Qwen3ForCausalLM"], **changes}
    return ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(architectures=["FancyForCausalLM"]), ("FancyForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")),
        (dict(hidden_act="gelu"), ("hidden_act", "gelu", "silu")),
        (dict(quantization_config=dict(quant_method="fp8")), ("quantised", "fp8")),
        (dict(sliding_window=64), ("sliding_window", "64", "128")),
        (dict(sliding_window=64, use_sliding_window=True, max_window_layers=1), ("sliding_window", "64")),
        (dict(rope_scaling=dict(type="spiral")), ("spiral", "yarn", "llama3")),
        (dict(rope_scaling=dict(type="linear")), ("linear", "factor")),
    ],
)
def test_M09_unsupported_is_refused_by_name(changes: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        load_model(config_of(**changes), "nowhere", load_format="dummy")
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("value", [None, 0, -1, "many", 10**12, 0.5, [], {}, math.nan, True], ids=repr)
@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"])
def test_M08_sizes_that_make_no_sense_are_named(key: str, value: object) -> None:
    """At once: ten million million layers were once built one by one."""
    if key == "head_dim" and value is None:
        return  # what follows from the other sizes
    with pytest.raises(ValueError, match=key):
        config_of(**{key: value})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (dict(num_key_value_heads=3), "KV heads"),
        (dict(architectures=5), "architectures"),
        (dict(rms_norm_eps=math.nan), "rms_norm_eps"),
        (dict(eos_token_id="x"), "eos_token_id"),
        (dict(eos_token_id=[[1]]), "eos_token_id"),
        (dict(sliding_window="x"), "sliding_window"),
        (dict(rope_parameters=5), "rope_parameters"),
        (dict(rope_parameters=dict(rope_theta="x")), "rope_theta"),
        (dict(rope_parameters=dict(rope_theta=-5.0)), "rope_theta"),
        (dict(rope_parameters=dict(partial_rotary_factor=2.0)), "partial_rotary_factor"),
        (dict(rope_parameters=dict(rope_type="linear", factor=0)), "linear"),
        (dict(rope_parameters=dict(rope_type="linear", factor=-1.0)), "linear"),
        (dict(rope_parameters=dict(rope_type="linear", factor="x")), "linear"),
        (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1.0, factor=2.0)), "yarn"),
    ],
    ids=repr,
)
def test_M08_settings_that_make_no_sense_are_named(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        load_model(config_of(**changes), "nowhere", load_format="dummy")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[1]", "5"], ids=repr)
def test_M08_broken_configurations_are_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        (dict(sliding_window=64), 64),
        (dict(sliding_window=128), None),
        (dict(sliding_window=64, use_sliding_window=False), None),
        (dict(sliding_window=64, use_sliding_window=True, max_window_layers=2), None),
        (dict(sliding_window=64, use_sliding_window=True, layer_types=["full_attention"] * 2), None),
    ],
)
def test_windows_that_never_bite_are_accepted(changes: dict[str, object], context: int | None) -> None:
    load_model(config_of(**changes), "nowhere", load_format="dummy", max_model_len=context)


# Rotary tables

LONG = dict(long_factor=[1.0 + i for i in range(8)], short_factor=[1.0 + i / 8 for i in range(8)])
YARN = dict(factor=4.0, original_max_position_embeddings=512)
ROTARY: dict[str, dict[str, object]] = {
    "default": dict(),
    "linear": dict(factor=3.0),
    "dynamic": dict(factor=2.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.5, high_freq_factor=4.0, original_max_position_embeddings=256),
    "yarn": YARN,
    "yarn-attention_factor": dict(YARN, attention_factor=0.7),
    "yarn-mscale": dict(YARN, mscale=0.707, mscale_all_dim=1.0),
    "yarn-betas": dict(YARN, beta_fast=16.0, beta_slow=2.0, truncate=False),
    "longrope": dict(LONG, original_max_position_embeddings=512),
    "longrope-factor": dict(LONG, original_max_position_embeddings=512, factor=2.0),
}


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("name", ROTARY)
def test_M05_rotary_tables_equal_transformers(name: str, theta: float) -> None:
    """Cosines and sines of every position up to the context, scale of attention included, within 1e-6."""
    section = dict(ROTARY[name], rope_type=name.partition("-")[0], rope_theta=theta)
    changes = dict(TINY, max_position_embeddings=2048)
    reference = LlamaRotaryEmbedding(LlamaConfig(**changes, rope_parameters=dict(section)))
    positions = torch.arange(2048)
    cos, sin = reference(torch.zeros(1), positions[None])
    rope = config_of(max_position_embeddings=2048, rope_parameters=section).rope
    for got, right in zip(RotaryEmbedding(rope, 2048, 2048)(positions), (cos, sin), strict=True):
        torch.testing.assert_close(torch.cat((got, got), dim=-1), right[0], atol=1e-6, rtol=0)


def test_M05_longrope_within_the_original_length_uses_the_short_factors() -> None:
    section = dict(ROTARY["longrope"], rope_type="longrope", rope_theta=1e4)
    reference = LlamaRotaryEmbedding(LlamaConfig(**dict(TINY, max_position_embeddings=2048), rope_parameters=section))
    positions = torch.arange(512)
    rope = config_of(rope_parameters=section).rope
    cos, _ = RotaryEmbedding(rope, 2048, 512)(positions)
    right = reference(torch.zeros(1), positions[None])[0][0]
    torch.testing.assert_close(torch.cat((cos, cos), dim=-1), right, atol=1e-6, rtol=0)


def test_both_spellings_of_rotary_settings_mean_the_same() -> None:
    old = config_of(rope_theta=5e5, rope_scaling=dict(type="linear", factor=2.0))
    new = config_of(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=5e5))
    assert old.rope == new.rope


def test_rotary_table_is_as_long_as_the_context() -> None:
    """Also when the context is longer than ``max_position_embeddings``; dynamic scaling cannot be."""
    model = load_model(config_of(), "nowhere", load_format="dummy", max_model_len=1000)
    assert model.model.rotary.cos_TF.shape == model.model.rotary.sin_TF.shape == (1000, 8)
    dynamic = config_of(rope_scaling=dict(type="dynamic", factor=2.0))
    with pytest.raises(ValueError, match=r"dynamic.*128"):
        load_model(dynamic, "nowhere", load_format="dummy", max_model_len=129)


def test_M13_partial_rotary_leaves_the_rest_of_the_head_alone() -> None:
    rope = config_of(partial_rotary_factor=0.5).rope
    cos, _ = RotaryEmbedding(rope, 128, 128)(torch.arange(3))
    assert rope.rotary_dim == 8 and cos.shape == (3, 4)


# Weights


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> None:
    """Split the checkpoint into three files so that merged tensors come from different ones."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_checkpoint_loads_the_same(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path)
    shard(tmp_path)
    assert_same_logits(load(tmp_path), reference, sizes=(100,))


def test_M08_harmless_extra_tensors_are_allowed(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, tie_word_embeddings=True)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    edit(tmp_path, add)
    assert_same_logits(load(tmp_path), reference, sizes=(100,))


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], object], tuple[str, ...]]] = {
    "missing": (lambda t: t.pop(K_PROJ), ("lacks", K_PROJ)),
    "no lm_head": (lambda t: t.pop("lm_head.weight"), ("lacks", "lm_head.weight")),
    "extra": (lambda t: t.update(surplus=torch.zeros(1)), ("unexpected", "surplus")),
    "bias not asked for": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
        ("unexpected", "q_proj.bias"),
    ),
    "shape": (lambda t: t.update({K_PROJ: torch.zeros(16, 64)}), (K_PROJ, "[16, 64]", "[32, 64]")),
    "quantised": (lambda t: t.update({K_PROJ: t[K_PROJ].to(torch.int8)}), (K_PROJ, "I8")),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_M08_tensors_that_do_not_fit_are_named(tmp_path: Path, fault: str) -> None:
    change, words = BROKEN[fault]
    save_tiny(tmp_path, tie_word_embeddings=False)
    edit(tmp_path, change)
    with pytest.raises(ValueError) as error:
        load(tmp_path)
    assert all(word in str(error.value) for word in words), error.value


def test_M08_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, tie_word_embeddings=False)
    shard(tmp_path)
    gone = tmp_path / "model-00002-of-00003.safetensors"
    content = gone.read_bytes()
    gone.write_bytes(content[:100])
    with pytest.raises(ValueError, match=gone.name):
        load(tmp_path)
    gone.unlink()
    with pytest.raises(ValueError, match=rf"lacks {gone.name}"):
        load(tmp_path)
    for file in tmp_path.glob("model*"):
        file.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*safetensors"):
        load(tmp_path)


def test_progress_is_shown_if_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path)
    capfd.readouterr()
    load(tmp_path)
    assert capfd.readouterr() == ("", "")
    load(tmp_path, progress=True)
    assert "loading weights" in capfd.readouterr().err


def test_dummy_weights_have_true_shapes_and_a_seed(tmp_path: Path) -> None:
    save_tiny(tmp_path, LlamaConfig, attention_bias=True)
    true = load(tmp_path)
    dummy, again = (load(tmp_path, load_format="dummy", dtype=torch.bfloat16) for _ in range(2))
    assert {n: t.shape for n, t in dummy.named_parameters()} == {n: t.shape for n, t in true.named_parameters()}
    for name, tensor in dummy.named_parameters():
        assert torch.equal(tensor, again.get_parameter(name)) and tensor.dtype == torch.bfloat16
        if name.endswith("bias"):
            assert not tensor.any()
        elif name.endswith("norm.weight"):
            assert bool((tensor == 1).all())
        else:
            assert 0.01 < float(tensor.float().std()) < 0.03, name


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def peak_growth(action: Callable[[], object]) -> int:
    """Largest growth of this process's anonymous memory while ``action`` runs, looked at every half millisecond."""
    gc.collect()
    with suppress(AttributeError):  # what earlier tests left would be used again, and no growth be seen
        ctypes.CDLL(None).malloc_trim(0)
    done, seen, before = threading.Event(), [0], anonymous_bytes()

    def watch() -> None:
        while not done.is_set():
            seen.append(anonymous_bytes())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = action()
    seen.append(anonymous_bytes())
    done.set()
    watcher.join()
    del result
    return max(seen) - before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_M10_loading_needs_one_tensor_beside_the_model(tmp_path: Path) -> None:
    """At most 1.2 of the largest tensor of anonymous memory, though bfloat16 is converted and gate and up merged."""
    sizes = dict(hidden_size=512, intermediate_size=8192, num_hidden_layers=3, tie_word_embeddings=True)
    config = config_of(**sizes)
    names = load_model(config, "nowhere", load_format="dummy", dtype=torch.bfloat16)
    tensors = {}
    for i in range(3):
        mlp = names.model.layers[i].mlp
        gate, up = mlp.gate_up_proj.weight.chunk(2)
        tensors |= {f"model.layers.{i}.mlp.{n}_proj.weight": t for n, t in (("gate", gate), ("up", up))}
        tensors[f"model.layers.{i}.mlp.down_proj.weight"] = mlp.down_proj.weight
        q, k, v = names.model.layers[i].self_attn.qkv_proj.weight.split((64, 32, 32))
        tensors |= {f"model.layers.{i}.self_attn.{n}_proj.weight": t for n, t in (("q", q), ("k", k), ("v", v))}
    tensors |= {n: t for n, t in names.named_parameters() if "qkv" not in n and "gate_up" not in n}
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors")
    del names, tensors, mlp, gate, up, q, k, v
    model_bytes = 4 * sum(t.numel() for t in load_model(config, tmp_path).parameters())  # warms up torch, too
    largest = 4 * 512 * 8192
    growth = peak_growth(lambda: load_model(config, tmp_path))
    assert model_bytes * 0.9 < growth < model_bytes + 1.2 * largest


# Ranks: threads of this process, each with its own gloo process group


def on_ranks(size: int, action: Callable[[TensorParallel], object]) -> list[object]:
    """What ``action`` returns on each of ``size`` ranks."""
    store, results = dist.HashStore(), [None] * size

    def work(rank: int) -> None:
        group = dist.ProcessGroupGloo(dist.PrefixStore("ranks", store), rank, size, timedelta(seconds=30))
        try:
            results[rank] = action(TensorParallel(rank, size, group))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


RANKS: dict[str, tuple[int, type, dict[str, object]]] = {
    "M01_odd_vocabulary": (2, Qwen3Config, dict(vocab_size=151, tie_word_embeddings=True)),
    "M01_untied": (4, Qwen3Config, dict(vocab_size=150, num_key_value_heads=4, tie_word_embeddings=False)),
    "M02_fewer_kv_heads": (4, Qwen3Config, dict(vocab_size=151, num_key_value_heads=2)),
    "M07_biases": (2, LlamaConfig, dict(attention_bias=True, mlp_bias=True)),
}


@pytest.mark.parametrize("name", RANKS)
def test_ranks_together_equal_transformers(tmp_path: Path, name: str) -> None:
    """M01, M02, M03, M07: three requests; each rank holds its share and returns all logits."""
    size, config_class, changes = RANKS[name]
    reference, texts = save_tiny(tmp_path, config_class, **changes), random_texts()
    want = expected(reference, texts)
    got = on_ranks(size, lambda parallel: run(load(tmp_path, parallel=parallel), texts, cut(texts, 7)))
    for logits in got:
        for ours, right in zip(logits, want, strict=True):
            torch.testing.assert_close(ours, right, atol=1e-4, rtol=0)


def test_a_rank_holds_its_share_only(tmp_path: Path) -> None:
    save_tiny(tmp_path, tie_word_embeddings=False)
    whole = sum(t.numel() for t in load(tmp_path).parameters())
    shares = on_ranks(2, lambda parallel: sum(t.numel() for t in load(tmp_path, parallel=parallel).parameters()))
    assert whole / 2 <= shares[0] == shares[1] < whole / 2 + 1000


def test_what_cannot_be_divided_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="process group"):
        TensorParallel(0, 2)
    with pytest.raises(ValueError, match="rank"):
        TensorParallel(2, 2)

    def build(changes: dict[str, int]) -> Callable[[TensorParallel], object]:
        return lambda parallel: load_model(config_of(**changes), "nowhere", load_format="dummy", parallel=parallel)

    for changes, word in (
        (dict(num_attention_heads=3, num_key_value_heads=1), "num_attention_heads 3"),
        (dict(intermediate_size=97), "intermediate_size 97"),
        (dict(num_attention_heads=6, num_key_value_heads=3), "num_key_value_heads 3"),
    ):
        with pytest.raises(ValueError, match=word):
            on_ranks(2, build(changes))


@pytest.mark.parametrize("names", [{}, dict(dtype=None), dict(torch_dtype=None)])
def test_E12_a_checkpoint_that_names_no_dtype_is_bfloat16(names: dict[str, None]) -> None:
    assert config_of(**names).dtype == "bfloat16"
    assert (
        config_of(torch_dtype="float16").dtype == config_of(dtype="float16", torch_dtype="float32").dtype == "float16"
    )
