"""The command line: `lorajax generate | serve | inspect | bench | demo`.

A user's mistake is one line on stderr and exit status 2.
"""

import argparse
import dataclasses
import os
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from lorajax.errors import AdapterFormatError, ConfigError, LoraJaxError
from serving.config import EngineConfig, field_descriptions
from serving.sampling_params import SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `lorajax` command. Returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except LoraJaxError as error:
        print(f"lorajax: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lorajax", description="Multi-LoRA serving in JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate", help="complete prompts, each with the base model or an adapter"
    )
    generate.add_argument("model", help="Hugging Face folder, *.gguf file or Hub id")
    generate.add_argument("--prompt", action="append", required=True, help="text to complete; repeatable")
    generate.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="adapter to load; every prompt is answered by the base model and by each; repeatable",
    )
    generate.add_argument("--chat", action="store_true", help="treat each prompt as a user's message")
    generate.add_argument("--max-tokens", type=int, default=64, help="tokens to generate (default: 64)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    generate.add_argument("--sampling-seed", type=int, help="makes draws reproducible, whatever else runs")
    _add_engine_flags(generate)
    generate.set_defaults(run=_generate)

    _add_serve(commands)

    inspect = commands.add_parser("inspect", help="what an adapter holds, and whether it can be served")
    inspect.add_argument("path", help="PEFT folder, or a checkpoint")
    inspect.add_argument("--model", help="the base model to check the adapter against")
    inspect.set_defaults(run=_inspect)

    bench = commands.add_parser("bench", help="measure a part of the engine")
    bench.add_argument("what", choices=["scheduler"], help="scheduler: host cost of a decode step")
    bench.add_argument("--json", metavar="PATH", help="write the figures to a file as well")
    bench.set_defaults(run=_bench)

    demo = commands.add_parser("demo", help="SmolLM2 with four adapters in one batch")
    demo.add_argument("--max-tokens", type=int, default=40, help="tokens per answer (default: 40)")
    demo.set_defaults(run=_demo)
    return parser


def _add_serve(commands: typing.Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve over gRPC, HTTP or both",
        description="Serve until SIGTERM or SIGINT. The environment variable LORAJAX_API_KEY, if set, is the "
        "bearer token that callers must bring.",
    )
    serve.add_argument("model", help="Hugging Face folder, *.gguf file or Hub id")
    serve.add_argument(
        "--lora-modules", nargs="+", action="extend", default=[], metavar="NAME=PATH", help="adapters to load"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    serve.add_argument("--grpc-port", type=int, help="gRPC port (default: 50051, if there is no --http-port)")
    serve.add_argument("--http-port", type=int, help="HTTP port (default: no HTTP)")
    serve.add_argument(
        "--adapter-root",
        action="append",
        default=[],
        metavar="FOLDER",
        help="folder from which remote callers may load adapters; repeatable (default: none)",
    )
    serve.add_argument(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="HTTP callers may load and unload adapters",
    )
    serve.add_argument(
        "--served-model-name", help="HTTP's name of the base model (default: the checkpoint's)"
    )
    serve.add_argument(
        "--max-message-bytes", type=int, default=16 << 20, help="largest request (default: 16 MiB)"
    )
    serve.add_argument("--certificate", type=Path, metavar="PEM", help="speak TLS, with this certificate")
    serve.add_argument("--key", type=Path, metavar="PEM", help="the certificate's private key")
    serve.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        help="how long running requests may take to end after a signal (default: 30)",
    )
    _add_engine_flags(serve)
    serve.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from serving.serve import ServeConfig, run

    grpc_port = arguments.grpc_port
    if grpc_port is None and arguments.http_port is None:
        grpc_port = ServeConfig.grpc_port
    config = ServeConfig(
        host=arguments.host,
        grpc_port=grpc_port,
        http_port=arguments.http_port,
        adapter_roots=tuple(arguments.adapter_root),
        allow_runtime_lora_updating=arguments.allow_runtime_lora_updating,
        served_model_name=arguments.served_model_name,
        max_message_bytes=arguments.max_message_bytes,
        token=os.environ.get("LORAJAX_API_KEY") or None,
        certificate=arguments.certificate,
        key=arguments.key,
        drain_seconds=arguments.drain_seconds,
    )
    adapters = dict(_name_and_path(value, "--lora-modules") for value in arguments.lora_modules)
    run(
        arguments.model,
        adapters,
        _engine_config(arguments),
        config,
        say=lambda line: print(f"lorajax: {line}", file=sys.stderr, flush=True),
    )
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    from serving.llm import LLM  # JAX loads only for commands that compute

    adapters = dict(_name_and_path(value, "--adapter") for value in arguments.adapter)
    params = SamplingParams(
        max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=arguments.sampling_seed
    )
    voices = [None, *adapters]
    asked = [(prompt, voice) for prompt in arguments.prompt for voice in voices]
    with LLM(arguments.model, adapters=adapters, config=_engine_config(arguments)) as llm:
        names = [voice for _, voice in asked]
        if arguments.chat:
            messages = [[{"role": "user", "content": prompt}] for prompt, _ in asked]
            outputs = llm.chat(messages, params, adapter=names)
        else:
            outputs = llm.generate([prompt for prompt, _ in asked], params, adapter=names)
    for (prompt, voice), output in zip(asked, outputs, strict=True):
        print(f"[{voice or 'base'}] {prompt!r} → {output.outputs[0].text!r}")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from serving.inspect import inspect_path

    report = inspect_path(Path(arguments.path), arguments.model)
    print(report.text)
    if report.problem is not None:
        raise AdapterFormatError(report.problem)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from serving.bench.scheduler import main as bench_scheduler

    bench_scheduler(arguments.json)
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from serving.demo import run_demo

    run_demo(Console(), arguments.max_tokens)
    return 0


def _name_and_path(value: str, flag: str) -> tuple[str, str]:
    name, separator, path = value.partition("=")
    if not separator or not name or not path:
        raise ConfigError(f"{flag} is {value!r}; allowed: name=path")
    return name, path


# ---- a flag for every field of EngineConfig ----


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine", "fields of EngineConfig; 'none' stands for None")
    described = field_descriptions()
    for field in dataclasses.fields(EngineConfig):
        flag = "--" + field.name.replace("_", "-")
        shown = f"{described[field.name]} (default: {field.default})".replace("%", "%%")
        if field.type is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=shown)
        else:
            group.add_argument(flag, type=_parser_of(field.type), default=field.default, help=shown)


def _parser_of(annotation: typing.Any) -> Callable[[str], object]:
    """How the text of a flag becomes a value of the field's type."""
    if typing.get_origin(annotation) is typing.Literal:
        return str
    if typing.get_origin(annotation) is tuple:
        return lambda text: tuple(text.split(","))
    if isinstance(annotation, types.UnionType):
        inner = _parser_of(next(arg for arg in typing.get_args(annotation) if arg is not type(None)))
        return lambda text: None if text == "none" else inner(text)
    return annotation


def _engine_config(arguments: argparse.Namespace) -> EngineConfig:
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    return EngineConfig(**{name: getattr(arguments, name) for name in names})


if __name__ == "__main__":
    sys.exit(main())
