"""The ``minisgl`` command: answers on stdout, one line on stderr when something goes wrong, exit codes for scripts."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoint

from minisgl import LLM, RequestOutput, SamplingParams, __version__, cli
from minisgl.config import EngineConfig
from minisgl.engine.runner import ModelRunner

ENGINE = ["--device", "cpu", "--page-size", "4", "--num-pages", "100", "--strict"]
GREEDY = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos"]


@pytest.fixture(scope="module")
def folder(checkpoint_of: Callable[[str], Checkpoint]) -> str:
    return str(checkpoint_of("qwen3").folder)


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    return LLM(folder, device="cpu", page_size=4, num_pages=100)


@pytest.fixture
def run(folder: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process: exit code, stdout, stderr."""

    def run(command: str, *options: str, model: str = folder) -> tuple[int, str, str]:
        try:
            code = cli.main([command, "--model", model, *ENGINE, *options])
        except SystemExit as exit:
            code = int(exit.code or 0)
        return (code, *capsys.readouterr())

    return run


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True, **changes})


Run = Callable[..., tuple[int, str, str]]


# ------------------------------------------------------------------------------------------------------------ generate


def test_generate_prints_the_texts(run: Run, llm: LLM) -> None:
    texts = [o.text for o in llm.generate(["Once upon a time", "Hello"], params())]
    assert run("generate", "--prompt", "Once upon a time", "--prompt", "Hello", *GREEDY) == (
        0,
        "".join(text + "\n" for text in texts),
        "",
    )


def test_generate_json_is_one_object_a_line_with_all_fields(run: Run, llm: LLM) -> None:
    prompts = ["Once upon a time", "Zwei\nZeilen 你好", "Hello"]
    options = [*GREEDY, "--logprobs", "2", "--prompt-logprobs", "0", "--n", "2", "--seed", "3"]
    code, out, err = run("generate", "--json", *options, *(x for p in prompts for x in ("--prompt", p)))
    assert (code, err) == (0, "")
    lines = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    wanted = llm.generate(prompts, params(logprobs=2, prompt_logprobs=0, n=2, seed=3))
    fields = {field.name for field in dataclasses.fields(RequestOutput)}
    assert len(lines) == len(prompts)
    for line, want in zip(lines, wanted, strict=True):
        assert line.keys() == fields | {"text", "token_ids", "finish_reason"}
        assert (line["prompt"], line["text"], line["token_ids"]) == (want.prompt, want.text, want.token_ids)
        assert [o["token_ids"] for o in line["outputs"]] == [o.token_ids for o in want.outputs]
        assert line["usage"]["completion_tokens"] == 12 and line["finish_reason"] == "length"
        assert [len(o["logprobs"]) for o in line["outputs"]] == [6, 6]
        assert len(line["prompt_logprobs"]) == line["usage"]["prompt_tokens"]


def test_generate_chat_uses_the_template(run: Run, llm: LLM) -> None:
    _, out, _ = run("generate", "--chat", "--json", "--prompt", "Hello!", *GREEDY)
    want = llm.chat([{"role": "user", "content": "Hello!"}], params())[0]
    assert json.loads(out)["prompt"] == want.prompt and json.loads(out)["token_ids"] == want.token_ids


def test_every_kind_of_option_arrives(run: Run) -> None:
    """Numbers, choices, switches both ways, and options that may be repeated."""
    options = ["--no-overlap", "--no-prefix-cache", "--order", "decode_first", "--chunk-size", "3", "--stop", "zz"]
    more = [
        "--stop",
        "yy",
        "--stop-token-ids",
        "5",
        "--stop-token-ids",
        "6",
        "--top-p",
        "0.5",
        "--no-skip-special-tokens",
    ]
    args = cli._parser().parse_args(["generate", "--prompt", "a", *options, *more])
    config, asked = cli._from_args(EngineConfig, args), cli._from_args(SamplingParams, args)
    assert (config.overlap, config.prefix_cache, config.order, config.chunk_size) == (False, False, "decode_first", 3)
    assert (asked.stop, asked.stop_token_ids, asked.top_p, asked.skip_special_tokens) == (
        ("zz", "yy"),
        (5, 6),
        0.5,
        False,
    )
    assert run("generate", "--prompt", "Hello", *options, *more, *GREEDY)[0] == 0


# --------------------------------------------------------------------------------------------------------- going wrong


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--prompt"),
        (["--prompt"], "--prompt"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens must be an integer at least 1"),
        (["--prompt", "a", "--max-tokens", "many"], "--max-tokens"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be"),
        (["--prompt", "a", "--temperature", "nan"], "temperature must be"),
        (["--prompt", "a", "--top-p", "7"], "top_p must be"),
        (["--prompt", "a", "--stop", ""], "stop must be"),
        (["--prompt", "a", "--page-size", "0"], "page_size must be"),
        (["--prompt", "a", "--order", "fifo"], "mixed"),
        (["--prompt", "a", "--max-token", "3"], "--max-token"),
        (["--prompt", "a", "--no-such-option"], "--no-such-option"),
        (["--prompt", "a", "surplus"], "surplus"),
    ],
)  # fmt: skip
def test_bad_usage_is_code_2_and_one_line(run: Run, options: list[str], says: str) -> None:
    code, out, err = run("generate", *options)
    assert (code, out) == (2, "") and says in err
    assert err.count("\n") == 1 and err.startswith("minisgl")


@pytest.mark.parametrize(
    "argv",
    [
        [], ["sing"], ["--sing"], ["book", "--port", "99999"], ["book", "--port", "-1"], ["bench"],
        ["bench", "offline", "--num-requests", "0"], ["bench", "offline", "--repeats", "0"],
        ["bench", "offline", "--input-len", "10", "5"], ["bench", "offline", "--output-len", "0", "5"],
        ["replay", "file", "--step", "-1"], ["replay", "file", "--what-if", "page_size=many"],
        ["replay", "file", "--what-if", "speed=high"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_bad_commands_are_code_2_and_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(argv)
    assert exit.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("command", ["bench all --output", "profile --perfetto", "bench serve --picture"])
@pytest.mark.parametrize("path", ["no/such/folder/file", "."])
def test_where_nothing_can_be_written_is_said_before_anything_is_measured(
    command: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main([*command.split(), path])
    assert exit.value.code == 2 and f"{path} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "word " * 900], "max_model_len"),
        (["--prompt", "a", "--stop-token-ids", "99999"], "vocabulary"),
        (["--prompt", "a", "--device", "cuda:99"], "cuda:99"),
        (["--prompt", "a", "--max-model-len", "4000"], "max_model_len 4000"),
        (["--prompt", "a", "--num-pages", "999999999"], "num_pages 999999999"),
    ],
)
def test_a_failure_is_code_1_and_one_line(run: Run, options: list[str], says: str) -> None:
    code, out, err = run("generate", *options)
    assert (code, out) == (1, "") and says in err
    assert err.count("\n") == 1 and err.startswith("minisgl: ")


def test_V15_a_model_that_is_not_there(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model in ("no-such-folder-or-model/x", "not a name at all", str(tmp_path / "nowhere"), str(tmp_path)):
        code, out, err = run("generate", "--prompt", "a", model=model)
        assert (code, out) == (1, "") and err.count("\n") == 1 and model in err, err


def test_a_failing_step_is_one_line_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("CUDA error: out of luck\nCUDA kernel errors might be asynchronous\n")

    monkeypatch.setattr(ModelRunner, "forward", failing)
    code, _, err = run("generate", "--prompt", "a")
    assert code == 1 and err.count("\n") == 1 and "out of luck" in err


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Ctrl-C in the middle of that step, counted over the whole command."""
    original, calls = ModelRunner.forward, itertools.count(1)

    def interrupted(self: ModelRunner, plan: Any) -> Any:
        if next(calls) == step:
            signal.raise_signal(signal.SIGINT)
        return original(self, plan)

    monkeypatch.setattr(ModelRunner, "forward", interrupted)


def test_ctrl_c_ends_the_command_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 3)
    code, out, err = run("generate", "--prompt", "Hello", *GREEDY)
    assert (code, out, err.strip()) == (130, "", "")


# ---------------------------------------------------------------------------------------------------------------- chat


def test_chat_remembers_the_conversation(run: Run, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\nAnd then?\n\nnot read any more\n"))
    code, out, err = run("chat", *GREEDY)
    messages, shown = [], ""
    for text in ("Hello!", "And then?"):
        messages.append({"role": "user", "content": text})
        answer = llm.chat(messages, params())[0].text
        messages.append({"role": "assistant", "content": answer})
        shown += f"> {answer}\n"
    assert (code, out) == (0, shown + "> ") and err.count("\n") == 1


def test_chat_ends_with_the_input_and_without_a_word(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for typed in ("", "\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        assert run("chat", *GREEDY)[:2] == (0, "> ")


def test_ctrl_c_cuts_an_answer_and_the_conversation_goes_on(
    run: Run, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = llm.chat([{"role": "user", "content": "Hello!"}], params(max_tokens=40))[0].text
    interrupt_at(monkeypatch, 5)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\nAnd then?\n"))
    code, out, _ = run("chat", "--temperature", "0", "--max-tokens", "40", "--ignore-eos")
    first, second, end = re.split(r"^> |\n> ", out)[1:]
    assert code == 0 and end == ""
    assert 0 < len(first) < len(whole) and whole.startswith(first) and len(second) > len(first)


def test_ctrl_c_at_the_prompt_ends_the_chat(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", pressed)
    assert run("chat")[0] == 130


# ---------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("config", [EngineConfig, SamplingParams])
def test_every_option_has_help(config: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    shown = capsys.readouterr().out
    for field in dataclasses.fields(config):
        assert len(cli._field_help(config).get(field.name, "")) > 10, field.name
        if field.name not in ("logit_bias", "seed"):
            assert re.search(rf"--{field.name.replace('_', '-')}[, \n]", shown), field.name
    assert "None" not in shown


def in_a_process(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120)


def test_as_a_module(folder: str) -> None:
    done = in_a_process("-m", "minisgl", "generate", "--model", folder, "--prompt", "Hello", "--json", *GREEDY, *ENGINE)
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 6
    bad = in_a_process("-m", "minisgl", "generate", "--model", folder, "--prompt", "a", "--n", "0")
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)


def test_help_does_not_wait_for_torch() -> None:
    done = in_a_process(
        "-c", "import sys; sys.modules['torch'] = None; from minisgl.cli import main; main(['--version'])"
    )
    assert (done.returncode, done.stdout) == (0, f"minisgl {__version__}\n"), done.stderr
