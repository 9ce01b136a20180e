"""The text layer: tokenizer, chat template, detokenizer, stop strings. Rows S04, S06, S08, S11 to S14, V06, V12, V13.

Tiny tokenizers are trained here, one for each family: byte-level BPE (GPT-2, Llama-3, Qwen), and BPE with byte tokens
and a leading space that decoding drops (Llama-2) or keeps (Gemma). Hugging Face's own decode and `str.find` are the
twins.
"""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import minisgl.server
from minisgl.request import SamplingParams
from minisgl.server import Detokenizer, StopStrings, TokenBytes, Tokenizer, check_messages, load_tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Hello world! STOP here, and the answer is 42.",
    "naïve café, 你好世界, سلام دنيا, สวัสดี",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
BOS, EOS, END = 1, 2, 3
HARD_TEXT = "👩‍👩‍👧‍👦 你好 naïve ไทย سلام"

LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n\n{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' and loop.index0 % 2 == 0 %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' and loop.index0 % 2 == 1 %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Roles must alternate user/assistant!') }}{% endif %}{% endfor %}"
)
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
USER = [{"role": "user", "content": "Hello world"}]

SETTINGS = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# ---------------------------------------------------------------------------------------------------------------------
# Tiny tokenizers


def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_tokens(["two words", "<think>", "ééé"])  # not in the alphabet of bytes, or only by accident
    return backend


def sentencepiece_backend(decoder: Any) -> Backend:
    """BPE on text with ▁ for a space, and byte tokens for what the vocabulary lacks: all but ASCII."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=SPECIAL + byte_tokens, show_progress=False)
    backend.train_from_iterator(SENTENCES[:2], trainer)
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = spec["added_tokens"][
        : len(SPECIAL)
    ]  # byte tokens are ordinary ones, the trainer cannot know
    backend = Backend.from_str(json.dumps(spec))
    backend.decoder = decoder
    return backend


def llama2_decoder(strip: bool) -> Any:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


BACKENDS = {
    "byte_level": byte_level_backend,
    "llama2": lambda: sentencepiece_backend(llama2_decoder(strip=True)),
    "gemma": lambda: sentencepiece_backend(llama2_decoder(strip=False)),
}


def write_model(
    folder: Path, kind: str = "byte_level", *, adds_bos: bool = True, eos: str | None = "</s>", template: str = ""
) -> Path:
    """A model's folder without a model."""
    backend = BACKENDS[kind]()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos, unk_token="<unk>")
    if template:
        hf.chat_template = template
    folder.mkdir(parents=True, exist_ok=True)
    hf.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Our tokenizer and Hugging Face's, from one folder."""
    folder = write_model(tmp_path_factory.mktemp(request.param), request.param)
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_model(tmp_path_factory.mktemp("byte_level")))


class LetterTokenizer:
    """One token a character (id = code point), or the given strings: for the arithmetic of stop strings."""

    def __init__(self, pieces: Sequence[str] = ()) -> None:
        self.pieces = pieces
        self.token_bytes = self
        self.special_ids: frozenset[int] = frozenset()

    def get(self, token_id: int, *, first: bool = False) -> bytes:
        return (self.pieces[token_id] if self.pieces else chr(token_id)).encode()


def stream(detokenizer: Detokenizer, chunks: Sequence[Sequence[int]]) -> str:
    """All that is sent; on the way, `text` must be exactly what was sent."""
    sent = ""
    for chunk in chunks:
        sent += detokenizer.push(chunk)
        assert detokenizer.text == sent
    sent += detokenizer.finish()
    assert detokenizer.text == sent and detokenizer.finish() == ""
    return sent


def cut(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """``ids`` in chunks of the given sizes, repeated; sizes may be 0."""
    chunks, start, i = [], 0, 0
    while start < len(ids):
        size = sizes[i % len(sizes)]
        chunks.append(ids[start : start + size])
        start, i = start + size, i + 1
    return chunks


chunk_sizes = st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any)


# ---------------------------------------------------------------------------------------------------------------------
# The room


def test_server_imports_and_works_without_torch(tmp_path: Path) -> None:
    folder = write_model(tmp_path, template=LLAMA3_TEMPLATE)
    code = f"""
import sys
sys.modules["torch"] = None
from minisgl.server import Detokenizer, load_tokenizer
tokenizer = load_tokenizer({str(folder)!r})
ids = tokenizer.encode_chat({USER!r}).tolist()
detokenizer = Detokenizer(tokenizer)
print(detokenizer.push(ids) + detokenizer.finish())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Hello world" in done.stdout


def test_importing_the_room_does_not_import_torch() -> None:
    """M12: the oldest transformers of our range do so by themselves; then nothing can be shown."""
    for module in ("transformers", "minisgl.server"):
        code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
        imports_torch = subprocess.run([sys.executable, "-c", code], timeout=120).returncode
        if module == "transformers" and imports_torch:
            pytest.skip("this transformers imports torch at once")
        assert not imports_torch


def test_public_names_exist() -> None:
    assert all(hasattr(minisgl.server, name) for name in minisgl.server.__all__)
    assert list(minisgl.server.__all__) == sorted(minisgl.server.__all__)


# ---------------------------------------------------------------------------------------------------------------------
# Prompts: BOS, templates, errors


def count_bos(ids: np.ndarray) -> int:
    assert ids.dtype == np.int32 and ids.ndim == 1
    return int((ids == BOS).sum())


@pytest.mark.parametrize("kind", sorted(BACKENDS))
@pytest.mark.parametrize("template", [LLAMA3_TEMPLATE, MISTRAL_TEMPLATE, PLAIN_TEMPLATE])
def test_S14_exactly_one_bos(tmp_path: Path, kind: str, template: str) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, kind, template=template))
    for ids in (
        tokenizer.encode("Hello world"),
        tokenizer.encode(""),
        tokenizer.encode("<s>Hello world"),  # a prompt that was rendered elsewhere
        tokenizer.encode_chat(USER),
        tokenizer.encode(tokenizer.render_chat(USER)),
    ):
        assert ids[0] == BOS and count_bos(ids) == 1


def test_S14_no_bos_where_the_tokenizer_adds_none(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, adds_bos=False, template=PLAIN_TEMPLATE))
    assert count_bos(tokenizer.encode("Hello")) == count_bos(tokenizer.encode_chat(USER)) == 0
    assert count_bos(tokenizer.encode("<s>Hello")) == 1  # asked for
    assert len(tokenizer.encode("")) == 0


def test_encode_agrees_with_hugging_face(pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, hf = pair
    for text in [*SENTENCES, HARD_TEXT, " two  spaces ", "a\n\nb"]:
        assert tokenizer.encode(text).tolist() == hf(text)["input_ids"]


def test_chat_agrees_with_hugging_face(tmp_path: Path) -> None:
    folder = write_model(tmp_path, template=LLAMA3_TEMPLATE)
    tokenizer, hf = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for prompt in (True, False):
        expected = hf.apply_chat_template(USER, add_generation_prompt=prompt, return_dict=False)
        assert tokenizer.encode_chat(USER, add_generation_prompt=prompt).tolist() == expected


def test_saved_truncation_and_padding_do_not_touch_prompts(tmp_path: Path) -> None:
    write_model(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    text = "The quick brown fox jumps over the lazy dog."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 2


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a"], "half a pair \ud83d"])
def test_prompts_that_are_not_text_are_refused(byte_level: Tokenizer, text: Any) -> None:
    with pytest.raises(ValueError, match="a prompt must be"):
        byte_level.encode(text)


@pytest.mark.parametrize("text", ["x", " ", "Once upon a time ", "\n", "\U0001f980"])
def test_a_prompt_that_is_far_too_long_is_refused_before_all_of_it_is_encoded(
    pair: tuple[Tokenizer, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client's prompt of megabytes must not hold up all others; what could fit is encoded as ever."""
    tokenizer, _ = pair
    for repeats in (1, 100, 400, 1000):
        whole = tokenizer.encode(text * repeats)
        if len(whole) <= 64:  # the context
            assert tokenizer.encode(text * repeats, most=64).tolist() == whole.tolist()
    lengths: list[int] = []
    encode = tokenizer._backend.encode

    class Counting:
        def encode(self, text: str, **options: Any) -> Any:
            lengths.append(len(text))
            return encode(text, **options)

    monkeypatch.setattr(tokenizer, "_backend", Counting())
    with pytest.raises(ValueError, match="far too long: more than 64 tokens"):
        tokenizer.encode(text * 100_000, most=64)
    assert sum(lengths) < 20_000


@pytest.mark.parametrize("ids", [[-1], [2**31], ["a"], [[1]], [1.5]])
def test_ids_that_are_not_ids_are_refused(byte_level: Tokenizer, ids: Any) -> None:
    with pytest.raises(ValueError, match="token id"):
        byte_level.decode(ids)


def test_V06_vocab_size_bounds_token_ids(byte_level: Tokenizer) -> None:
    last = byte_level.vocab_size - 1
    assert byte_level.token_bytes.get(last) is not None and byte_level.token_bytes.get(last + 1) is None
    SamplingParams(logit_bias={last: 5}).check_vocabulary(byte_level.vocab_size)
    with pytest.raises(ValueError, match="99999999"):
        SamplingParams(logit_bias={99999999: 5}).check_vocabulary(byte_level.vocab_size)


def test_V12_template_that_raises_is_a_value_error_with_its_message(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, template=MISTRAL_TEMPLATE))
    with pytest.raises(ValueError, match="Roles must alternate user/assistant!"):
        tokenizer.encode_chat(USER + USER)
    assert "Hello world" in tokenizer.render_chat(USER)  # and the next request is answered


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ missing.attribute }}",
        "{{ 'a' + messages }}",
        "{{ 1 // 0 }}",
        "{% for m in messages %}",
    ],
)
def test_V12_templates_run_in_a_sandbox_and_their_faults_are_value_errors(tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, template=template))
    with pytest.raises(ValueError, match=r"the chat template raised: ."):
        tokenizer.render_chat(USER)


def test_V13_no_template_says_so_and_points_to_completions(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match=r"no chat template.*/v1/completions.*--chat-template"):
        tokenizer.encode_chat(USER)


def test_V13_template_from_text_or_file_replaces_the_models_own(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", template=LLAMA3_TEMPLATE)
    file = tmp_path / "template.jinja"
    file.write_text(PLAIN_TEMPLATE, encoding="utf-8")
    for template in (PLAIN_TEMPLATE, file, str(file)):
        assert load_tokenizer(folder, chat_template=template).render_chat(USER) == "user: Hello world\n"
    with pytest.raises(ValueError, match="cannot read the chat template"):
        load_tokenizer(folder, chat_template=tmp_path / "missing.jinja")


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        (None, "messages must be a list"),
        ("hello", "messages must be a list"),
        ([], "at least one"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\].role must be one of .*assistant.*got None"),
        ([{"role": "robot", "content": "x"}], "got 'robot'"),
        ([{"role": [], "content": "x"}], "role must be one of"),
        ([*USER, {"role": "user"}], r"messages\[1\].content is missing"),
        ([{"role": "assistant", "content": None}], "content is missing"),
        ([{"role": "user", "content": None, "tool_calls": [{}]}], "content is missing"),
        ([{"role": "user", "content": 3}], r"content must be a string or a list of text parts, got int"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] must be a text part"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "got 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be a string"),
    ],
)
def test_malformed_messages_are_refused_by_name(tmp_path: Path, messages: Any, fault: str) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, template=PLAIN_TEMPLATE))
    with pytest.raises(ValueError, match=fault):
        tokenizer.encode_chat(messages)


def test_messages_are_copied_and_text_parts_joined() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    messages = [
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ]
    assert check_messages(messages) == [
        {"role": "user", "content": "Hello world", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
    ]
    assert messages[0]["content"] is parts and messages[1]["content"] is None


def test_developer_speaks_as_system_unless_the_template_knows_the_role(tmp_path: Path) -> None:
    messages = [{"role": "developer", "content": "Be brief."}]
    folder = write_model(tmp_path, template=PLAIN_TEMPLATE)
    assert load_tokenizer(folder).render_chat(messages) == "system: Be brief.\n"
    knowing = PLAIN_TEMPLATE + "{# developer #}"
    assert load_tokenizer(folder, chat_template=knowing).render_chat(messages) == "developer: Be brief.\n"
    assert messages[0]["role"] == "developer"


def test_tools_reach_the_template_and_are_checked(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, template="{{ tools[0].name if tools is not none else 'none' }}"))
    assert tokenizer.render_chat(USER, tools=[{"name": "clock"}]) == "clock"
    assert tokenizer.render_chat(USER, tools=[]) == tokenizer.render_chat(USER) == "none"
    for tools in ({"name": "clock"}, ["clock"]):
        with pytest.raises(ValueError, match="tools must be"):
            tokenizer.render_chat(USER, tools=tools)


@pytest.mark.parametrize(
    "fault", ["missing folder", "a file", "empty folder", "none", "broken tokenizer", "broken config"]
)
def test_tokenizers_that_cannot_be_loaded_say_so_in_one_line(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "model"
    if fault == "a file":
        folder.write_text("x")
    elif fault != "missing folder":
        folder.mkdir()
    if fault == "none":  # of which the library makes a tokenizer without a vocabulary
        write_model(folder)
        for path in folder.glob("*token*"):
            path.unlink()
        (folder / "config.json").write_text('{"model_type": "qwen2"}')
    if fault == "broken tokenizer":
        write_model(folder)
        (folder / "tokenizer.json").write_text("{")
    if fault == "broken config":
        write_model(folder)
        (folder / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=str(folder)) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_decoders_that_look_at_neighbours_are_refused() -> None:
    for decoder in (decoders.BPEDecoder(), decoders.CTC(), decoders.Strip(" ", 0, 1)):
        with pytest.raises(ValueError, match="cannot be streamed"):
            TokenBytes(sentencepiece_backend(decoder))


@pytest.mark.parametrize(
    ("config", "generation", "eos", "expected"),
    [
        (None, None, "</s>", {EOS}),
        ({"eos_token_id": 7}, None, "</s>", {EOS, 7}),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": None}, "</s>", {EOS, 7, 8}),
        ({"eos_token_id": None}, {"eos_token_id": [8, 9]}, None, {8, 9}),
        ({}, {"eos_token_id": 0}, None, {0}),
        ({"text_config": {"eos_token_id": 5}}, {"eos_token_id": [6]}, "</s>", {EOS, 5, 6}),
        ({"eos_token_id": None}, {}, None, set()),
        (None, None, None, set()),
    ],
)
def test_S11_eos_is_the_union_of_all_sources(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, Any] | None,
    generation: dict[str, Any] | None,
    eos: str | None,
    expected: set[int],
) -> None:
    write_model(tmp_path, eos=eos)
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING, logger="minisgl"):
        tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == expected and isinstance(tokenizer.eos_token_ids, frozenset)
    warnings = [record for record in caplog.records if "EOS" in record.getMessage()]
    assert len(warnings) == (0 if expected else 1)


# ---------------------------------------------------------------------------------------------------------------------
# The stream


def test_S06_no_broken_characters_in_the_stream(pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, hf = pair
    ids = tokenizer.encode(HARD_TEXT)[1:].tolist()
    assert len(ids) > len(HARD_TEXT)  # characters are really split over tokens
    detokenizer = Detokenizer(tokenizer)
    sent = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(sent) == tokenizer.decode(ids)  # nothing is left for the end
    assert detokenizer.finish() == "" and "\ufffd" not in detokenizer.text
    assert detokenizer.text == hf.decode(ids) and detokenizer.text.strip() == HARD_TEXT


def test_S08_complete_characters_come_and_the_broken_rest_is_one_mark(pair: tuple[Tokenizer, Any]) -> None:
    """Tokens that straddle 2-byte letters end in mid-letter: whole letters are sent, the half one becomes U+FFFD."""
    tokenizer, _ = pair
    of_byte = {tokenizer.token_bytes.get(i): i for i in reversed(range(tokenizer.vocab_size))}
    ids = [of_byte[bytes([byte])] for byte in "سلام".encode()[:-1]]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push([i]) for i in ids) == "سلا"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.text == tokenizer.decode(ids) == "سلا\ufffd"


def test_S13_special_tokens_are_skipped_unless_asked(pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, hf = pair
    hello, world = (tokenizer.encode(text)[1:].tolist() for text in ("Hello", " world"))
    ids = [*hello, END, *world, EOS]
    assert {BOS, EOS, END} <= tokenizer.special_token_ids
    for skip in (True, False):
        text = stream(Detokenizer(tokenizer, skip_special_tokens=skip), [[i] for i in ids])
        assert text == tokenizer.decode(ids, skip_special_tokens=skip) == hf.decode(ids, skip_special_tokens=skip)
        assert ("<|end|>" in text, "</s>" in text) == (not skip, not skip)


@SETTINGS
@given(text=st.text(max_size=60), sizes=chunk_sizes, data=st.data())
@example(text=HARD_TEXT, sizes=[1], data=None)
def test_S06_stream_of_any_text_is_its_decode(
    pair: tuple[Tokenizer, Any], text: str, sizes: list[int], data: st.DataObject | None
) -> None:
    """Any text, cut off anywhere, in chunks of any size."""
    tokenizer, hf = pair
    ids = tokenizer.encode(text)[1:].tolist()
    if data is not None:
        ids = ids[: data.draw(st.integers(0, len(ids)), label="length")]
    sent = stream(Detokenizer(tokenizer), cut(ids, sizes))
    array = np.array(ids, np.int32)
    assert sent == tokenizer.decode(ids) == tokenizer.decode(array) == stream(Detokenizer(tokenizer), [array])
    twin = hf.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in twin or tokenizer.token_bytes._is_byte_level:
        assert sent == twin


@SETTINGS
@given(data=st.data(), sizes=chunk_sizes, skip=st.booleans())
def test_stream_of_any_ids_is_their_decode(
    pair: tuple[Tokenizer, Any], data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    """Ids as a random model gives them: broken bytes, special tokens, padded rows of the vocabulary."""
    tokenizer, hf = pair
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=50))
    sent = stream(Detokenizer(tokenizer, skip_special_tokens=skip), cut(ids, sizes))
    assert sent == tokenizer.decode(ids, skip_special_tokens=skip)
    twin = hf.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in twin or tokenizer.token_bytes._is_byte_level:
        assert sent == twin


def test_every_token_decodes_as_with_hugging_face(pair: tuple[Tokenizer, Any]) -> None:
    """The whole vocabulary, first in a text and after another token."""
    tokenizer, hf = pair
    before = tokenizer.encode("the")[-1:].tolist()
    for token_id in range(tokenizer.vocab_size + 2):
        for ids in ([token_id], [*before, token_id]):
            for skip in (True, False):
                assert tokenizer.decode(ids, skip_special_tokens=skip) == hf.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.WordPiece("▁"),
        decoders.Metaspace(prepend_scheme="never"),
        None,
        llama2_decoder(True),
    ],
    ids=["metaspace", "wordpiece", "metaspace-never", "none", "llama2"],
)
def test_token_bytes_agree_with_the_library_for_other_decoders(decoder: Any) -> None:
    spec = json.loads(sentencepiece_backend(llama2_decoder(True)).to_str())
    spec["decoder"] = None if decoder is None else json.loads(decoder.__getstate__())
    backend = Backend.from_str(json.dumps(spec))
    token_bytes = TokenBytes(backend)
    broken = range(len(SPECIAL) + 0x80, len(SPECIAL) + 0x100)  # halves of characters: tested above
    whole = [i for i in range(backend.get_vocab_size()) if i not in broken]
    rng = random.Random(0)
    for _ in range(500):
        ids = rng.choices(whole, k=rng.randrange(5))
        for skip in (True, False):
            expected = backend.decode(ids, skip_special_tokens=skip)
            assert token_bytes.join(ids, skip_special_tokens=skip).decode() == expected


def test_work_is_linear_and_nothing_is_decoded_twice(
    pair: tuple[Tokenizer, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look at each token, whatever came before; the library's decoder sees a token once in a lifetime."""
    loaded, hf = pair
    tokenizer = Tokenizer(hf, eos_token_ids=loaded.eos_token_ids)  # with an empty table
    looked_at: list[int] = []
    decoded: list[int] = []
    get, look_up = TokenBytes.get, TokenBytes._look_up
    monkeypatch.setattr(TokenBytes, "get", lambda self, i, **kw: looked_at.append(i) or get(self, i, **kw))
    monkeypatch.setattr(TokenBytes, "_look_up", lambda self, i, first: decoded.append(i) or look_up(self, i, first))
    ids = random.Random(1).choices(range(len(SPECIAL), tokenizer.vocab_size), k=5000)
    stream(Detokenizer(tokenizer, stop=["never", "n" * 50]), [[i] for i in ids])
    assert looked_at == ids
    assert len(decoded) <= len(set(ids)) + 1  # one more: the first token of the text


# ---------------------------------------------------------------------------------------------------------------------
# Stop strings


def naive_stop(text: str, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """(end, start, string) of the match that is complete first, the longest of those; found on the whole text."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    return min(found, default=None)


def naive_held(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that may begin a stop string."""
    return max(k for k in range(len(text) + 1) if k == 0 or any(stop.startswith(text[-k:]) for stop in stops))


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "reason", "num_tokens"),
    [
        (["ab S", "TO", "P cd"], ["STOP"], "ab ", "STOP", 3),
        (["ab S", "TO", "X cd"], ["STOP"], "ab STOX cd", None, 3),
        (["a", "\n", "\n", "b"], ["\n\n"], "a", "\n\n", 3),
        (["a", "\n", "b", "\n\nc"], ["\n\n"], "a\nb", "\n\n", 4),
        (["x", "a", "a", "b"], ["aab", "ab"], "x", "aab", 4),  # complete at once: the longest
        (["xab", "cd"], ["abcd", "bc"], "xa", "bc", 2),  # the first to be complete, wherever it began
        (["xabcd"], ["abcd", "bc"], "xa", "bc", 1),  # and so however the text is cut
        (["aaa", "ab"], ["aab"], "aa", "aab", 2),
        (["你", "好", "!"], ["好!"], "你", "好!", 3),
        (["STOP"], ["STOP"], "", "STOP", 1),
        (["a", "ST"], ["STOP"], "aST", None, 2),  # held to the end, then given out
        (["a", "b"], [], "ab", None, 2),
    ],
)
def test_S12_stop_strings(pieces: list[str], stop: list[str], text: str, reason: str | None, num_tokens: int) -> None:
    for include in (False, True):
        for size in (1, 2, 9):
            detokenizer = Detokenizer(LetterTokenizer(pieces), stop=stop, include_stop_str_in_output=include)
            expected = text + reason if include and reason else text
            assert stream(detokenizer, cut(range(len(pieces)), [size])) == expected
            assert (detokenizer.stop_reason, detokenizer.num_tokens) == (reason, num_tokens)


def test_S04_tokens_after_the_stop_are_dropped() -> None:
    """The engine may be a step ahead: what it still brings is neither text nor counted."""
    detokenizer = Detokenizer(LetterTokenizer(["ab", "STOP!", "surplus"]), stop=["STOP"])
    assert detokenizer.push([0]) == "ab" and detokenizer.push([1]) == "" and detokenizer.stop_reason == "STOP"
    assert detokenizer.push([2]) == "" and detokenizer.finish() == ""
    assert (detokenizer.text, detokenizer.num_tokens) == ("ab", 2)


@SETTINGS
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=25),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    sizes=chunk_sizes,
    include=st.booleans(),
)
def test_S12_stop_strings_equal_a_search_of_the_whole(
    pieces: list[str], stops: list[str], sizes: list[int], include: bool
) -> None:
    detokenizer = Detokenizer(LetterTokenizer(pieces or [""]), stop=stops, include_stop_str_in_output=include)
    found, whole = naive_stop("".join(pieces), stops), "".join(pieces)
    num_pushed = 0
    for chunk in cut(range(len(pieces)), sizes):
        detokenizer.push(chunk)
        num_pushed += len(chunk)
        so_far = "".join(pieces[:num_pushed])
        if found is None or len(so_far) < found[0]:  # exactly what may begin a stop string is held back, no more
            assert detokenizer.text == so_far[: len(so_far) - naive_held(so_far, stops)]
            assert detokenizer.stop_reason is None
        else:
            assert detokenizer.text == whole[: found[0] if include else found[1]]
    detokenizer.finish()
    if found is None:
        assert (detokenizer.text, detokenizer.stop_reason) == (whole, None)
        assert detokenizer.num_tokens == len(pieces)
    else:
        end, start, stop = found
        assert (detokenizer.text, detokenizer.stop_reason) == (whole[: end if include else start], stop)
        assert (
            len("".join(pieces[: detokenizer.num_tokens])) >= end > len("".join(pieces[: detokenizer.num_tokens - 1]))
        )


@pytest.mark.parametrize(
    ("text", "stops", "min_tokens", "sent", "reason"),
    [
        ("abx", ["ab"], 3, ["", "ab", "x"], None),  # let pass, the stop string is not held back any longer
        ("abc", ["ab", "bc"], 3, ["", "a", ""], "bc"),  # but its end may still begin another one
        ("abc", ["ab", "abc"], 3, ["", "", ""], "abc"),  # and so may all of it
        ("xabab", ["ab"], 3, ["x", "", ""], "ab"),  # complete with the third token: early enough to end the text
    ],
)
def test_min_tokens_and_what_is_held_back(
    text: str, stops: list[str], min_tokens: int, sent: list[str], reason: str | None
) -> None:
    detokenizer = Detokenizer(LetterTokenizer(), stop=stops, min_tokens=min_tokens)
    assert [detokenizer.push([ord(char)]) for char in text][:3] == sent
    assert detokenizer.finish() == "" and detokenizer.stop_reason == reason


@SETTINGS
@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    min_tokens=st.integers(0, 20),
    sizes=chunk_sizes,
)
def test_min_tokens_lets_early_stop_strings_pass(
    text: str, stops: list[str], min_tokens: int, sizes: list[int]
) -> None:
    """One letter a token: a stop string counts if it ends at letter ``min_tokens`` or later."""
    ends = [(text[:n], s) for n in range(max(min_tokens, 1), len(text) + 1) for s in stops if text[:n].endswith(s)]
    before, reason = min(ends, key=lambda end: (len(end[0]), -len(end[1])), default=(text, ""))
    detokenizer = Detokenizer(LetterTokenizer(), stop=stops, min_tokens=min_tokens)
    # What was let pass may have been sent, so only what is still held back can be cut off; it always holds the match.
    assert stream(detokenizer, cut([ord(char) for char in text], sizes)) == before.removesuffix(reason)
    assert detokenizer.stop_reason == (reason or None) and detokenizer.num_tokens == len(before)


@SETTINGS
@given(text=st.text(max_size=40), sizes=chunk_sizes, data=st.data())
def test_S12_stop_strings_over_real_tokens(
    pair: tuple[Tokenizer, Any], text: str, sizes: list[int], data: st.DataObject
) -> None:
    tokenizer, _ = pair
    ids = tokenizer.encode(text)[1:].tolist()
    whole = tokenizer.decode(ids)
    assume(whole)
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[start : start + data.draw(st.integers(1, 5))]
    detokenizer = Detokenizer(tokenizer, stop=[stop, "\0never"])
    assert stream(detokenizer, cut(ids, sizes)) == whole[: whole.find(stop)]
    assert detokenizer.stop_reason == stop
    assert stop in tokenizer.decode(ids[: detokenizer.num_tokens])
    assert stop not in tokenizer.decode(ids[: detokenizer.num_tokens - 1])


def test_S12_many_and_long_stop_strings_cost_no_more() -> None:
    """The worst text for a search that starts over: each letter still costs one step and, on average, one fallback."""

    class Counting(list):  # type: ignore[type-arg]
        num_reads = 0

        def __getitem__(self, index: Any) -> Any:
            Counting.num_reads += 1
            return super().__getitem__(index)

    stops = StopStrings(["a" * n + "x" for n in range(1, 500, 31)])
    stops._fallback = Counting(stops._fallback)
    state, text = 0, ("a" * 600 + "b") * 20
    for char in text:
        state = stops.step(state, char)
        assert stops.match[state] is None
    assert Counting.num_reads <= len(text)
