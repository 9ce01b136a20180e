"""The ``minisgl`` command. Its options are the fields of the configuration classes, its help their docstrings.

Exit code 2 with one line for bad usage, 1 with one line for a failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from minisgl import __version__
from minisgl.benchmark.shapes import SHAPES
from minisgl.config import EngineConfig
from minisgl.replay import replay
from minisgl.request import RequestOutput, SamplingParams
from minisgl.scheduler.what_if import parse_changes
from minisgl.server.config import ServerConfig
from minisgl.server.remote import RemoteServer
from minisgl.utils import check_int


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` without the program's name, by default that of the process. Returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        print(f"minisgl: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="minisgl", description="Serve large language models, and read how.")
    parser.add_argument("--version", action="version", version=f"minisgl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    generate = _command(commands, "generate", _generate, "answer prompts and print the answers")
    generate.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="a prompt; may be repeated")
    generate.add_argument("--chat", action="store_true", help="put each prompt through the model's chat template")
    generate.add_argument("--json", action="store_true", help="print one JSON object a prompt, a line each")
    _add_fields(generate, SamplingParams)
    _add_fields(generate, EngineConfig)

    chat = _command(commands, "chat", _chat, "talk to a model in the terminal")
    _add_remote(chat, "talk to the model of this running server, instead of loading one")
    _add_fields(chat, SamplingParams, skip=("n", "logprobs", "prompt_logprobs"))
    _add_fields(chat, EngineConfig)

    serve = _command(commands, "serve", _serve, "answer over HTTP, in OpenAI's format, until told to stop")
    _add_fields(serve, ServerConfig)
    _add_fields(serve, EngineConfig, skip=("trace",))

    book = _command(commands, "book", _book, "build the book, run its notebooks, and serve it on this machine")
    book.add_argument("--check", action="store_true", help="do all but serve")
    book.add_argument("--port", type=_integer(0, 65535), default=0, help="port on 127.0.0.1; 0 takes a free one")
    replay_ = _command(commands, "replay", _replay, "play a flight record again, and look into it")
    replay_.add_argument("file", help="what --record wrote")
    replay_.add_argument("--step", type=_integer(0), metavar="N", help="print queue, rows, pages and tree after step N")
    replay_.add_argument(
        "--what-if", action="append", default=[], metavar="FIELD=VALUE",
        help="the same arrivals under another policy, such as order=prefill_first; may be repeated",
    )  # fmt: skip
    replay_.add_argument("--bisect", choices=["check"], help="find the first step after which an invariant is broken")
    _add_file(replay_, "--perfetto")

    info = _command(commands, "info", _info, "say what a model is, and how much of it fits on this machine")
    info.add_argument("model_name", nargs="?", metavar="MODEL", help='"tiny", a folder, or a hub id (default: tiny)')
    shown = ("device", "dtype", "page_size", "attention", "memory_fraction", "max_model_len")
    _add_fields(info, EngineConfig, only=shown)

    bench = commands.add_parser("bench", help="measure", description="Measure.").add_subparsers(
        metavar="WHAT", required=True
    )
    offline = _bench(bench, "offline", _bench_offline, "throughput of a batch of random prompts", repeats=3)
    offline.add_argument("--num-requests", type=_integer(1), default=256, metavar="N", help="prompts (default: 256)")
    _add_lengths(offline)
    offline.add_argument(
        "--compare", action="append", default=[], choices=["plain loop", "recorded", "no prefix cache", "transformers"],
        help="also measure this variant, or transformers' continuous batching; may be repeated",
    )  # fmt: skip
    latency = _bench(bench, "latency", _bench_latency, "few requests of one length", repeats=3)
    latency.add_argument(
        "--row", action="append", type=_row("NxIN/OUT"), metavar="NxIN/OUT",
        help="requests, tokens in, tokens out; may be repeated (default: 1x128/512, 16x128/512, 64x512/256)",
    )  # fmt: skip
    prefill = _bench(bench, "prefill", _bench_prefill, "prompts that bring a single token each", repeats=5)
    prefill.add_argument(
        "--row", action="append", type=_row("NxIN"), metavar="NxIN", help="prompts, tokens of each (default: 32x1024)"
    )
    host = _bench(bench, "host", _bench_host, "does the host keep up with the device?", repeats=None)
    host.add_argument(
        "--batch", action="append", type=_integer(1), metavar="N", help="requests; may be repeated (default: 1 to 512)"
    )
    attention = _command(bench, "attention", _bench_attention, "attention kernels side by side, each against its floor")
    gemm = _command(bench, "gemm", _bench_gemm, "products of few tokens: our kernels against the library's")
    for parser_ in (attention, gemm):
        _add_file(parser_, "--output")
        _add_fields(parser_, EngineConfig, only=("device",))
    for name in ("decode", "prefill"):
        attention.add_argument(
            f"--{name}",
            action="append",
            type=_row("NxLEN"),
            metavar="NxLEN",
            help="requests, tokens of each; may be repeated",
        )
    attention.add_argument("--heads", action="append", type=_row("QxKV"), metavar="QxKV", help="query heads, KV heads")
    attention.add_argument("--repeats", type=_integer(1), default=7, metavar="N", help="measured runs (default: 7)")
    gemm.add_argument("--shapes", type=_shapes, metavar="NAMES", help="of these published models, separated by commas")
    _add_file(gemm, "--table-output")
    online = _bench(bench, "serve", _bench_serve, "requests that arrive by chance at a server")
    _add_remote(online, "measure this running server, instead of one that is started for it")
    online.add_argument("--rate", type=_positive, default=4.0, help="requests a second; inf: all at once (default: 4)")
    online.add_argument("--num-requests", type=_integer(1), default=100, metavar="N", help="prompts (default: 100)")
    _add_lengths(online)
    online.add_argument("--ttft-limit", type=_positive, metavar="SECONDS", help="to the first token, for goodput")
    online.add_argument(
        "--tpot-limit", type=_positive, metavar="SECONDS", help="from token to token in the mean, for goodput"
    )
    online.add_argument("--seed", type=_integer(0), default=0, metavar="N", help="of arrivals and prompts (default: 0)")
    _add_file(online, "--picture")
    front = _command(bench, "front", _bench_front, "the server without a model: events and tokens a second")
    front.add_argument(
        "--streams", type=_integer(1), action="append", metavar="N",
        help="answers at once; may be repeated (default: 100, 200, 300, 400)",
    )  # fmt: skip
    front.add_argument("--rate", type=_positive, default=50.0, help="tokens a second of each answer (default: 50)")
    front.add_argument("--seconds", type=_positive, default=5.0, help="that an answer takes (default: 5)")
    _add_file(front, "--output")
    _add_fields(front, EngineConfig, only=("model",))
    everything = _bench(bench, "all", _bench_all, "all rows that have a target, in one table", skip=("model",))
    everything.add_argument(
        "--shapes", type=_shapes, default=[], metavar="NAMES", help="only these shapes, separated by commas"
    )

    profile = _command(commands, "profile", _profile, "say where the time of a step goes, kernel by kernel")
    profile.add_argument("--kind", choices=["decode", "prefill"], default="decode", help="of step (default: decode)")
    for name, default, text in (("batch", 64, "requests"), ("context", 512, "tokens of each"), ("steps", 8, "steps")):
        profile.add_argument(
            f"--{name}", type=_integer(1), default=default, metavar="N", help=f"{text} (default: {default})"
        )
    _add_file(profile, "--perfetto")
    _add_measured(profile)
    return parser


# -------------------------------------------------------------------------------------------------------- commands


def _generate(args: argparse.Namespace) -> int:
    config, params = _from_args(EngineConfig, args), _from_args(SamplingParams, args)
    with _open(config) as llm:
        if args.chat:
            conversations = [[{"role": "user", "content": prompt}] for prompt in args.prompt]
            outputs = llm.chat(conversations, params)
        else:
            outputs = llm.generate(args.prompt, params)
    for output in outputs:
        if args.json:
            print(json.dumps(_as_json(output), ensure_ascii=False))
        else:
            print("\n".join(completion.text for completion in output.outputs))
    return 0


def _chat(args: argparse.Namespace) -> int:
    config, params = _from_args(EngineConfig, args), _from_args(SamplingParams, args)
    if args.url is not None:
        _refuse_engine_options(args)
        server = RemoteServer(args.url, args.api_key)
        return _converse(lambda messages: server.stream_chat(messages, params))
    with _open(config) as llm:
        return _converse(lambda messages: _new_texts(llm.stream(llm.tokenizer.encode_chat(messages), params)))


def _converse(answer: Callable[[list[dict[str, str]]], Generator[str, None, None]]) -> int:
    """Read what the user says, and print the pieces of text that ``answer`` has to the conversation so far."""
    print("An empty line or Ctrl-D ends the conversation, Ctrl-C an answer.", file=sys.stderr)
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = input("> ")
        except EOFError:
            return 0
        if not text.strip():
            return 0
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": _print_answer(answer(messages))})


def _print_answer(pieces: Generator[str, None, None]) -> str:
    """Stream the answer to the terminal; returns it. Ctrl-C cuts it short."""
    shown = ""
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            shown += piece
    except KeyboardInterrupt:
        pass
    finally:
        pieces.close()
    print()
    return shown


def _new_texts(outputs: Any) -> Generator[str, None, None]:
    """Of growing outputs, what each adds."""
    num_chars = 0
    try:
        for output in outputs:
            yield output.text[num_chars:]
            num_chars = len(output.text)
    finally:
        outputs.close()


def _serve(args: argparse.Namespace) -> int:
    from minisgl.serve import serve  # uvicorn takes a while

    return serve(_from_args(EngineConfig, args), _from_args(ServerConfig, args))


def _book(args: argparse.Namespace) -> int:
    from minisgl.book import book  # only this command needs it

    return book(check=args.check, port=args.port)


def _replay(args: argparse.Namespace) -> int:
    try:
        parse_changes(args.what_if)
    except ValueError as error:
        args.parser.error(f"argument --what-if: {error}")
    return replay(
        args.file, step=args.step, changes=args.what_if, bisect=args.bisect is not None, perfetto=args.perfetto
    )


def _info(args: argparse.Namespace) -> int:
    from minisgl.info import info  # draws in torch

    setattr(args, "EngineConfig.model", args.model_name)
    print(info(_from_args(EngineConfig, args)))
    return 0


def _bench_offline(args: argparse.Namespace) -> int:
    from minisgl.benchmark.offline import bench_offline  # draws in torch
    from minisgl.benchmark.workload import mixed_lengths

    _check_lengths(args)
    workload = mixed_lengths(args.num_requests, input_len=tuple(args.input_len), output_len=tuple(args.output_len))
    bench_offline(
        workload=workload,
        repeats=args.repeats,
        variants=("as asked", *(name for name in args.compare if name != "transformers")),
        transformers="transformers" in args.compare,
        **_measured(args),
    )
    return 0


def _bench_latency(args: argparse.Namespace) -> int:
    from minisgl.benchmark.latency import ROWS, bench_latency  # draws in torch

    bench_latency(rows=args.row or ROWS, repeats=args.repeats, **_measured(args))
    return 0


def _bench_prefill(args: argparse.Namespace) -> int:
    from minisgl.benchmark.prefill import ROWS, bench_prefill  # draws in torch

    bench_prefill(rows=args.row or ROWS, repeats=args.repeats, **_measured(args))
    return 0


def _bench_host(args: argparse.Namespace) -> int:
    from minisgl.benchmark.host import BATCHES, bench_host  # draws in torch

    bench_host(batches=args.batch or BATCHES, **_measured(args))
    return 0


def _bench_attention(args: argparse.Namespace) -> int:
    from minisgl.benchmark.attention import bench_attention  # draws in torch

    bench_attention(
        device=_from_args(EngineConfig, args).device,
        decode=args.decode,
        prefill=args.prefill,
        heads=args.heads,
        repeats=args.repeats,
        output=args.output,
    )
    return 0


def _bench_gemm(args: argparse.Namespace) -> int:
    from minisgl.benchmark.gemm import bench_gemm  # draws in torch
    from minisgl.launch import find_device

    chosen = {"shapes": args.shapes} if args.shapes else {}
    device = find_device(_from_args(EngineConfig, args).device)
    if device.type != "cuda":
        raise ValueError(
            "bench gemm needs a CUDA device: elsewhere its kernels are interpreted, and times mean nothing"
        )
    bench_gemm(device=device, output=args.output, table_output=args.table_output, **chosen)
    return 0


def _bench_serve(args: argparse.Namespace) -> int:
    from minisgl.benchmark.serve import bench_serve  # draws in torch
    from minisgl.benchmark.workload import mixed_lengths

    _check_lengths(args)
    if args.url is not None:
        _refuse_engine_options(args)
    bench_serve(
        url=args.url,
        workload=mixed_lengths(
            args.num_requests, input_len=tuple(args.input_len), output_len=tuple(args.output_len), seed=args.seed
        ),
        rate=args.rate,
        first_token_limit_s=args.ttft_limit,
        token_limit_s=args.tpot_limit,
        api_key=args.api_key,
        seed=args.seed,
        picture=args.picture,
        **_measured(args),
    )
    return 0


def _bench_front(args: argparse.Namespace) -> int:
    from minisgl.benchmark.front import bench_front  # draws in torch

    options = _options(_from_args(EngineConfig, args))
    chosen = {"streams": args.streams} if args.streams else {}
    bench_front(options, rate=args.rate, seconds=args.seconds, output=args.output, **chosen)
    return 0


def _bench_all(args: argparse.Namespace) -> int:
    import torch

    from minisgl.benchmark.targets import bench_all  # draws in torch

    options = _options(_from_args(EngineConfig, args))
    if options["device"] == "auto" and not torch.cuda.is_available():
        args.parser.error("there is no CUDA device here; --device cpu measures on the CPU, for hours")
    bench_all(options, shapes=args.shapes, output=args.output)
    return 0


def _profile(args: argparse.Namespace) -> int:
    from minisgl.benchmark.profile import profile  # draws in torch

    profile(
        kind=args.kind,
        batch=args.batch,
        context=args.context,
        steps=args.steps,
        perfetto=args.perfetto,
        **_measured(args),
    )
    return 0


def _options(config: EngineConfig) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def _open(config: EngineConfig) -> Any:
    from minisgl.llm import LLM  # torch takes seconds to import; `--help` does not wait for it

    return LLM(**_options(config))


def _as_json(output: RequestOutput) -> dict[str, Any]:
    first = {"text": output.text, "token_ids": output.token_ids, "finish_reason": output.finish_reason}
    return {**first, **dataclasses.asdict(output)}


# -------------------------------------------------------------------------------------------------------- options


_GROUPS = {SamplingParams: "sampling", EngineConfig: "engine", ServerConfig: "server"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], description: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=description, description=description[0].upper() + description[1:] + ".", allow_abbrev=False
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def _bench(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    description: str,
    *,
    repeats: int | None = None,
    skip: Collection[str] = (),
) -> argparse.ArgumentParser:
    """A command that measures an engine."""
    parser = _command(commands, name, run, description)
    if repeats is not None:
        text = f"measured runs of each, after one that warms up (default: {repeats})"
        parser.add_argument("--repeats", type=_integer(1), default=repeats, metavar="N", help=text)
    _add_measured(parser, skip=skip)
    return parser


def _add_measured(parser: argparse.ArgumentParser, *, skip: Collection[str] = ()) -> None:
    """The options that all measurements share."""
    if "model" not in skip:
        text = "a published model's shape with random weights, instead of a model"
        parser.add_argument("--shape", choices=list(SHAPES), help=text)
    _add_file(parser, "--output")
    _add_fields(parser, EngineConfig, skip=("record", "trace", *skip))


_FILES = {
    "--output": "write the figures, and where they come from, as JSON",
    "--perfetto": "write the trace for ui.perfetto.dev or chrome://tracing",
    "--picture": "write an SVG with a line for each request",
    "--table-output": "write the table that the engine chooses by",
}


def _add_file(parser: argparse.ArgumentParser, flag: str) -> None:
    """Where something is written in the end. Whether it can be is seen at once."""

    def writable(text: str) -> str:
        path = Path(text)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise argparse.ArgumentTypeError(f"{text} cannot be written")
        return text

    parser.add_argument(flag, type=writable, metavar="FILE", help=_FILES[flag])


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    for name in ("input", "output"):
        parser.add_argument(
            f"--{name}-len", type=_integer(1), nargs=2, default=(100, 1024), metavar=("MIN", "MAX"),
            help="tokens, between these two (default: 100 1024)",
        )  # fmt: skip


def _check_lengths(args: argparse.Namespace) -> None:
    for name, (low, high) in {"input": args.input_len, "output": args.output_len}.items():
        if low > high:
            args.parser.error(f"argument --{name}-len: MIN must be at most MAX, got {low} {high}")


def _add_remote(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--url", help=text)
    parser.add_argument("--api-key", metavar="KEY", help="that the server at --url wants")


def _refuse_engine_options(args: argparse.Namespace) -> None:
    """A running server has its engine."""
    prefix = EngineConfig.__name__ + "."
    given = [name for name, value in vars(args).items() if name.startswith((prefix, "shape")) and value is not None]
    if given:
        flag = given[0].removeprefix(prefix).replace("_", "-")
        args.parser.error(f"argument --{flag}: not with --url, whose server has an engine already")


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    """The same as arguments of what measures."""
    return {"options": _options(_from_args(EngineConfig, args)), "shape": args.shape, "output": args.output}


def _add_fields(
    parser: argparse.ArgumentParser, config: type, *, skip: Collection[str] = (), only: Collection[str] | None = None
) -> None:
    """An option for each field of a dataclass: type and choices from its annotation, help from its docstring."""
    group = parser.add_argument_group(_GROUPS[config])
    hints, help_of = get_type_hints(config), _field_help(config)
    # `logit_bias` has no short form; `seed` is a field of both, and an option of the request's.
    skip = {*skip, "logit_bias"} if config is SamplingParams else {*skip, "seed"}
    for field in dataclasses.fields(config):
        if field.name in skip or (only is not None and field.name not in only):
            continue
        flag = "--" + field.name.replace("_", "-")
        text = help_of[field.name].replace("%", "%%").replace("None: ", "if not given: ")
        if field.default not in (None, (), ""):
            text += f" (default: {field.default})"
        kind, many = _kind(hints[field.name])
        options: dict[str, Any] = {"dest": f"{config.__name__}.{field.name}", "default": None, "help": text}
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif get_origin(kind) is Literal:
            group.add_argument(flag, choices=get_args(kind), **options)
        else:
            action = "append" if many else "store"
            group.add_argument(flag, type=kind, action=action, metavar=kind.__name__.upper(), **options)


def _integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """A parser of integers within these limits."""

    def parse(text: str) -> int:
        try:
            value: object = int(text)
        except ValueError:
            value = text
        try:
            check_int("the value", value, low=low, high=high)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return int(text)

    return parse


def _positive(text: str) -> float:
    """A number above 0; ``inf`` is one."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _shapes(text: str) -> list[str]:
    """Names of published shapes, separated by commas."""
    names = text.split(",")
    if not set(names) <= SHAPES.keys():
        raise argparse.ArgumentTypeError(f"must be among {', '.join(SHAPES)}, got {text!r}")
    return names


def _row(form: str) -> Callable[[str], tuple[int, ...]]:
    """A parser of positive integers written like ``form``, such as NxIN/OUT: its words stand for the numbers."""
    pattern = re.sub("[A-Z]+", r"(\\d+)", form)

    def parse(text: str) -> tuple[int, ...]:
        match = re.fullmatch(pattern, text, re.ASCII)
        numbers = tuple(map(int, match.groups())) if match else ()
        if not numbers or min(numbers) < 1:
            raise argparse.ArgumentTypeError(f"must be {form} with positive integers, got {text!r}")
        return numbers

    return parse


def _kind(hint: Any) -> tuple[Any, bool]:
    """What one value of an annotation is parsed as, and whether the option may be repeated."""
    if get_origin(hint) in (Union, types.UnionType):
        alternatives = [a for a in get_args(hint) if a is not type(None)]
        several = [a for a in alternatives if _is_sequence(a)]
        hint = (several or alternatives)[0]
    if _is_sequence(hint):
        return get_args(hint)[0], True
    return hint, False


def _is_sequence(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Iterable)


def _field_help(config: type) -> dict[str, str]:
    """The ``Args`` section of a docstring: field -> text."""
    section = re.search(r"Args:\n(.*?)(?:\n\s*\n|\Z)", inspect.getdoc(config) or "", re.S)
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section.group(1) if section else "", re.M)
    return {name: " ".join(text.split()) for name, text in found}


def _from_args(config: type, args: argparse.Namespace) -> Any:
    """The dataclass from its options; bad values end the program with code 2."""
    prefix = config.__name__ + "."
    given = {k.removeprefix(prefix): v for k, v in vars(args).items() if k.startswith(prefix) and v is not None}
    try:
        return config(**given)
    except ValueError as error:
        args.parser.error(str(error))
