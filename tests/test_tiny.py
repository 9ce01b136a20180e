"""The bundled model and its recipe: the files are what the card says, and the recipe keeps its promises."""

import hashlib
import json
import re
import sys
from pathlib import Path
from random import Random

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "minisgl" / "tiny"
RECIPE = ROOT / "book" / "tiny"
FILES = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def recipe():
    """The recipe's modules, which are plain scripts beside each other."""
    sys.path.insert(0, str(RECIPE))
    try:
        import corpus
        import engine
        import gates
        import network
        import plots
        import sources
        import tales
    finally:
        sys.path.remove(str(RECIPE))
    modules = dict(
        corpus=corpus, engine=engine, gates=gates, network=network, plots=plots, sources=sources, tales=tales
    )
    yield type("Recipe", (), modules)
    for name in modules:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def test_files_and_size():
    assert {path.name for path in MODEL.iterdir()} == FILES
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 16_000_000


def test_manifest_is_true():
    rows = re.findall(r"^\| `([^`]+)` \| ([\d,]+) \| `([0-9a-f]{64})` \|$", (MODEL / "README.md").read_text(), re.M)
    assert {name for name, _, _ in rows} == FILES - {"README.md"}
    for name, size, digest in rows:
        data = (MODEL / name).read_bytes()
        assert len(data) == int(size.replace(",", ""))
        assert hashlib.sha256(data).hexdigest() == digest, name


def test_card_and_results_agree(recipe):
    report = json.loads((ROOT / "book" / "results" / "tiny-training.json").read_text())
    card = (MODEL / "README.md").read_text()
    assert report["missed"] == [] and set(report["gates"]) == set(recipe.gates.GATES)
    for gate, least in recipe.gates.GATES.items():
        assert report["gates"][gate] >= least
        assert f"| {gate} | {100 * least:.0f} % | {100 * report['gates'][gate]:.2f} % |" in card
    assert str(report["seed"]) in card


def test_licence_has_the_notices():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "WordNet 3.0 Copyright 2006 by Princeton University" in text and "Julia Silge" in text


@pytest.mark.parametrize(
    "text",
    ["Once upon a time", "tabs\tand\n\nlines  ", "naïve café", "你好,世界", "🦊🐻 fox\u200d", "12345 + 67 = 12412", ""],
)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids, clean_up_tokenization_spaces=False) == text


def test_digits_stand_alone_and_no_bos(tokenizer):
    assert len(tokenizer("1234567890").input_ids) == 10
    assert not any(re.search(r"\d.|.\d", token) for token in tokenizer.get_vocab() if "<|" not in token)
    assert tokenizer.bos_token_id is None and tokenizer("a").input_ids[0] > 2


def test_ids_agree(tokenizer):
    config = json.loads((MODEL / "config.json").read_text())
    generation = json.loads((MODEL / "generation_config.json").read_text())
    end, start, turn_end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    assert (end, start, turn_end) == (0, 1, 2)
    assert len(tokenizer) == config["vocab_size"] == 4096
    assert config["eos_token_id"] == generation["eos_token_id"] == [turn_end, end]
    assert tokenizer.eos_token_id == turn_end and tokenizer.pad_token_id == end


def test_template_is_what_training_writes(tokenizer, recipe):
    turns = [("Hello!", "Hello."), ("What is 7 + 5?", "7 + 5 = 12.")]
    messages = [{"role": "system", "content": "Be brief."}]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text + recipe.tales.END_OF_TEXT == recipe.tales.chat_text(turns, "Be brief.")
    asked = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert text.startswith(asked) and asked.endswith("<|im_start|>assistant\n")


def test_shapes():
    from safetensors import safe_open

    config = json.loads((MODEL / "config.json").read_text())
    stated = dict(
        hidden_size=256, num_hidden_layers=7, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        intermediate_size=640, max_position_embeddings=2048, tie_word_embeddings=True, model_type="qwen3",
    )  # fmt: skip
    assert stated.items() <= config.items()
    with safe_open(MODEL / "model.safetensors", "np") as weights:
        slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
    assert {part.get_dtype() for part in slices.values()} == {"BF16"}
    assert slices["model.embed_tokens.weight"].get_shape() == [4096, 256]
    assert slices["model.layers.6.self_attn.q_proj.weight"].get_shape() == [512, 256]
    assert len(slices) == 7 * 11 + 2 and "lm_head.weight" not in slices


def test_training_network_is_qwen3(recipe):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    ours = recipe.network.Qwen3(recipe.network.CONFIG)
    theirs = Qwen3ForCausalLM(Qwen3Config(**recipe.network.CONFIG)).float()
    theirs.load_state_dict(ours.state_dict() | {"lm_head.weight": ours.model["embed_tokens"].weight})
    ids = torch.randint(4096, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_recipe_is_rich_and_deterministic(recipe):
    tales = recipe.tales
    assert len(recipe.plots.PLOTS) >= 20 and len(tales.NOUNS) >= 200
    assert tales.documents(3, 50) == tales.documents(3, 50) != tales.documents(4, 50)
    every = [text for plot in recipe.plots.PLOTS.values() for beat in plot for text in beat]
    assert len(set(every)) > 300
    slots = tales.cast(Random(0))
    for text in every:  # no slot without a filling
        text.format_map(slots)


def test_held_out_is_never_written(recipe):
    tales = recipe.tales
    plain = {re.sub(r"\W", "", question).lower() for question in tales.HELD_OUT_IDENTITY}
    sums = [re.compile(re.escape(s).replace(r"\{a\}", r"\d+").replace(r"\{b\}", r"\d+")) for s in tales.HELD_OUT_SUMS]
    named = re.compile(rf"({'|'.join(tales.KINDS)}) (?:named|called) ({'|'.join(tales.NAMES)})\b")
    equipped = re.compile(rf"about an? ({'|'.join(tales.KINDS)}) and an? ({'|'.join(tales.THINGS)})\b")
    seen = 0
    for text in tales.documents(11, 3000):
        for question in re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text, re.S) + [text.split("\n")[0]]:
            assert re.sub(r"\W", "", question).lower() not in plain, question
            assert not any(wording.fullmatch(question) for wording in sums), question
        for kind, other in named.findall(text) + equipped.findall(text):
            assert not tales.held_out(kind, other), (kind, other)
            seen += 1
    assert seen > 500 and any(tales.held_out(k, n) for k in tales.KINDS for n in tales.NAMES)


def test_r_strings_are_read(recipe):
    import struct
    import zlib

    def vector(strings):
        body = b"X\n" + struct.pack(">iiii", 3, 0x40201, 0x30500, 5) + b"UTF-8" + struct.pack(">ii", 16, len(strings))
        for text in strings:
            body += struct.pack(">ii", 0x40009, len(text.encode())) + text.encode()
        return struct.pack(">i", len(body)) + zlib.compress(body)

    wanted = [["one line", "", "naïve"], ["x"]]
    assert list(recipe.sources.strings_of_rdb(b"".join(map(vector, wanted)))) == wanted


def test_greedy_answers(recipe):
    import torch

    writer = recipe.gates.Writer(MODEL, "cpu", torch.float32)
    sums, total = ["What is 7 + 5?", "What is 2 + 3?", "How much do 13 and 8 make?"], [12, 5, 21]
    answers = writer.write([*sums, "Who are you?"], 48)
    assert [recipe.gates.last_number(text) for text, _ in answers[:3]] == total
    assert "tiny" in answers[3][0] and "minisgl" in answers[3][0] and all(end for _, end in answers)
    assert "5" in writer.write(["What is 2 + 3?"], 16, chat=False)[0][0]
