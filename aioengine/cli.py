"""The `aioengine` command: argument parsing only. What a subcommand does is in `aioengine.commands`.

Nothing heavy is imported before the arguments are known to be good, so `--help` and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from aioengine import __version__
from aioengine.commands import options
from aioengine.commands.cache_options import add_cache
from aioengine.commands.replay_options import add_replay
from aioengine.commands.structured_output_options import add_structured_output_options
from aioengine.commands.top_arguments import add_top
from aioengine.errors import AioEngineError
from aioengine.printable import PrintableFormatter, printable

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

_DESCRIPTION = "An asyncio LLM engine: continuous batching over a paged KV cache, with every step visible."
_EPILOG = """\
examples:
  aioengine demo                                      eight prompts at once, streaming live
  aioengine generate "Why is the sky blue?"
  aioengine chat --system "Answer in one sentence."

`aioengine COMMAND --help` describes a command and its options.
"""


class _Parser(argparse.ArgumentParser):
    """Errors take one line and point to the help: the usage of forty options helps nobody."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {printable(message)} (see {self.prog} --help)\n")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(shutil.get_terminal_size().columns, 120) - 2)

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        # Without its first line ("COMMAND") the list of subcommands speaks for itself.
        return text.partition("\n")[2] if isinstance(action, argparse._SubParsersAction) else text


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """command: the one that will be parsed; the options of the others are left out then, which take a tenth of a second to put together."""
    parser = _Parser(prog="aioengine", description=_DESCRIPTION, epilog=_EPILOG, usage="aioengine [--version] COMMAND ...")
    parser.add_argument("--version", action="version", version=f"aioengine {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", prog="aioengine")
    adders: dict[str, Callable[[Any], None]] = {
        "generate": _add_generate,
        "chat": _add_chat,
        "serve": _add_serve,
        "demo": _add_demo,
        "top": add_top,
        "replay": add_replay,
        "bench": _add_bench,
        "cache": add_cache,
        "pull": _add_pull,
        "doctor": _add_doctor,
    }
    for add in adders.values() if command not in adders else [adders[command]]:
        add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit status."""
    start_time = time.perf_counter()
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser(argv[0] if argv else None)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    _set_up_logging(args.log_level)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # where an encoding lacks a character: its escape, not a traceback
    try:
        status: int | None = args.handler(args, start_time)
        sys.stdout.flush()
    except AioEngineError as exc:
        print(f"aioengine: error: {printable(str(exc))}", file=sys.stderr)
        # ConfigError and InvalidRequestError are ValueErrors: the caller's mistake.
        return EXIT_USAGE if isinstance(exc, ValueError) else EXIT_FAILURE
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.startswith("aioengine"):
            raise
        print(
            f"aioengine: error: the package {printable(exc.name)} is not installed: install aioengine with its dependencies",
            file=sys.stderr,
        )
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return status or 0


def _set_up_logging(level: str) -> None:
    import logging

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _add_bench(commands: Any) -> None:
    from aioengine.commands.bench import add_bench

    add_bench(commands)


# ---------------------------------------------------------------------------------------------------- generate
def _add_generate(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue one prompt, streaming to stdout",
        description="Continue one prompt and stream the text to stdout. A terminal is sent no control characters (they are shown as ·); "
        "a file or a pipe gets the text as it is.",
        usage="aioengine generate [options] PROMPT",
        epilog="""\
examples:
  aioengine generate "Why is the sky blue?"
  aioengine generate --raw --temperature 0.8 --seed 1 "Once upon a time"
  aioengine generate --n 3 --temperature 0.8 --presence-penalty 0.5 "Name a fruit."
  git diff | aioengine generate --system "Describe this change." --max-tokens 64 -
""",
    )
    parser.add_argument("prompt", metavar="PROMPT", help='the prompt; "-" reads it from stdin')
    options.add_model_option(parser)
    template = parser.add_mutually_exclusive_group()
    template.add_argument(
        "--chat", action="store_true", default=None, help="put PROMPT into the chat template (default if the model has one)"
    )
    template.add_argument("--raw", dest="chat", action="store_false", help="take PROMPT as it is")
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    parser.add_argument("--n", type=int, metavar="N", default=1, help="continuations to generate, at once (default: 1)")
    parser.add_argument("--stats", action="store_true", help="print sizes, latency and speed to stderr at the end")
    options.add_run_options(parser)
    options.add_sampling_options(parser, max_tokens=256, temperature=0.0)
    add_structured_output_options(parser)
    options.add_engine_options(parser)
    parser.set_defaults(handler=_generate, parser=parser)


def _generate(args: argparse.Namespace, start_time: float) -> None:
    if args.chat is False and args.system is not None:
        args.parser.error("argument --system: not allowed with argument --raw, which has no messages")
    config, params = options.engine_config(args), options.sampling_params(args)
    prompt = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
    if not prompt:
        args.parser.error("the prompt is empty")

    from aioengine.commands.generate import GenerateSettings, generate

    generate(
        GenerateSettings(
            prompt=prompt,
            config=config,
            params=params,
            chat=args.chat,
            system=args.system,
            publish=options.publish_options(args),
            stats=args.stats,
            start_time=start_time,
        )
    )


# ---------------------------------------------------------------------------------------------------- chat
def _add_chat(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with the model",
        description="Talk with the model. Ctrl-C stops an answer, Ctrl-D or /exit leaves, /help lists the commands. Control characters "
        "in an answer are shown as · on a terminal; a file or a pipe gets the text as it is.",
        usage="aioengine chat [options]",
        epilog="""\
examples:
  aioengine chat
  aioengine chat --system "You are a pirate." --temperature 0.9 --stats
""",
    )
    options.add_model_option(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument("--stats", action="store_true", help="print sizes, latency and speed after each answer")
    options.add_run_options(parser)
    options.add_sampling_options(parser, max_tokens=512, temperature=0.7)
    options.add_engine_options(parser)
    parser.set_defaults(handler=_chat)


def _chat(args: argparse.Namespace, start_time: float) -> None:
    config, params = options.engine_config(args), options.sampling_params(args)

    from aioengine.commands.chat import ChatSettings, chat

    chat(ChatSettings(config=config, params=params, system=args.system, publish=options.publish_options(args), stats=args.stats))


# ---------------------------------------------------------------------------------------------------- serve
def _add_serve(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="answer OpenAI's API over HTTP",
        description="Answer OpenAI's API over HTTP (completions, chat, responses, models), and Anthropic's messages. "
        "SIGTERM lets running requests end; a second one does not.",
        usage="aioengine serve [options] [MODEL]",
        epilog="""\
examples:
  aioengine serve smollm2
  aioengine serve smollm2 --port 9000 --events /tmp/e.sock     and beside it: aioengine top /tmp/e.sock
  AIOENGINE_API_KEY=... aioengine serve smollm2 --host 0.0.0.0
  aioengine serve --fake --script answers.json         no model: for the tests of your own program
""",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="built-in alias, folder, .gguf file or repository (default: smollm2)")
    add(
        "--fake",
        action="store_true",
        help="no model: the real scheduler, and answers from --script; for tests of programs that use a server",
    )
    add("--script", metavar="FILE", help="what --fake answers, as JSON (see the documentation; default: one sentence)")
    add("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, this machine only)")
    add("--port", type=int, metavar="N", default=8000, help="port to listen at (default: 8000)")
    add("--api-key-file", metavar="FILE", help="file with the key that requests must show (default: AIOENGINE_API_KEY)")
    add("--no-auth", action="store_true", help="let other machines in without a key")
    add("--served-model-name", action="append", metavar="NAME", default=[], help="name of the model in requests; may be repeated")
    parsers = ("hermes", "llama3_json", "mistral")
    add("--tool-call-parser", choices=parsers, help="how the model writes that it calls a tool (default: as its chat template says)")
    add("--allowed-origin", action="append", metavar="ORIGIN", default=[], help="web pages that may call; may be repeated (default: none)")
    add("--max-connections", type=int, metavar="N", default=1024, help="connections at once (default: 1024)")
    add("--otlp-traces-endpoint", metavar="URL", help="send a span for each request to this OTLP collector (needs aioengine[otel])")
    add("--log-requests", action="store_true", help="log prompts and parameters (default: nothing of a prompt is logged)")
    options.add_run_options(parser)
    options.add_engine_options(parser)
    parser.set_defaults(handler=_serve, parser=parser)


def _serve(args: argparse.Namespace, start_time: float) -> None:
    if args.script is not None and not args.fake:
        args.parser.error("argument --script: needs --fake")
    args.model = args.model or ("fake" if args.fake else "smollm2")
    config, publish = options.engine_config(args), options.publish_options(args)
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as exc:
        args.parser.error(f"{exc}: the server needs its extra: pip install 'aioengine[server]'")

    from aioengine.commands.serve import ServeCommand, read_answers, serve

    serve(
        ServeCommand(
            config=config,
            publish=publish,
            host=args.host,
            port=args.port,
            api_key_file=args.api_key_file,
            no_auth=args.no_auth,
            served_model_names=tuple(args.served_model_name),
            tool_call_parser=args.tool_call_parser,
            allowed_origins=tuple(args.allowed_origin),
            max_connections=args.max_connections,
            log_requests=args.log_requests,
            otlp_traces_endpoint=args.otlp_traces_endpoint,
            script=read_answers(args.script) if args.fake else None,
        )
    )


# ---------------------------------------------------------------------------------------------------- demo
def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="run eight prompts at once, streaming live",
        description="Run eight prompts at once through one engine, show them as they stream, and sum up what the engine did.",
        usage="aioengine demo [options]",
        epilog="""\
examples:
  aioengine demo
  aioengine demo --no-async-scheduling                 the same tokens, one step at a time
  aioengine demo --num-kv-cache-blocks 40              too few blocks: watch it preempt and resume
""",
    )
    options.add_model_option(parser)
    parser.add_argument("--max-tokens", "-n", type=int, metavar="N", default=96, help="most tokens of each answer (default: 96)")
    parser.add_argument("--plain", action="store_true", help="plain lines even on a terminal")
    options.add_run_options(parser)
    options.add_engine_options(parser)
    parser.set_defaults(handler=_demo)


def _demo(args: argparse.Namespace, start_time: float) -> None:
    from aioengine.sampling_params import SamplingParams

    config, params = options.engine_config(args), SamplingParams(temperature=0.0, max_tokens=args.max_tokens)

    from aioengine.commands.demo import DemoSettings, demo

    demo(DemoSettings(config=config, params=params, publish=options.publish_options(args), plain=args.plain, start_time=start_time))


# ---------------------------------------------------------------------------------------------------- pull
def _add_pull(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "pull",
        help="fetch a model into the cache",
        description="Fetch a model into the cache, so that a later start needs no network.",
        usage="aioengine pull [options] NAME",
        epilog="""\
examples:
  aioengine pull smollm2
  aioengine pull HuggingFaceTB/SmolLM2-360M-Instruct
""",
    )
    parser.add_argument("name", metavar="NAME", help='built-in alias ("smollm2", "gemma3-270m") or Hugging Face repository')
    options.add_log_option(parser)
    parser.set_defaults(handler=_pull)


def _pull(args: argparse.Namespace, start_time: float) -> None:
    from aioengine.commands.pull import pull

    pull(args.name)


# ---------------------------------------------------------------------------------------------------- doctor
def _add_doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what this machine offers the engine, what is missing, and which path a model takes",
        description="Say what this machine offers the engine, and what is missing; of a model, which code runs it and why. "
        "Exit status 1 if models run on the slow path of this machine, or if the model cannot be served.",
        usage="aioengine doctor [MODEL]",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model, as --model names it; nothing is fetched")
    options.add_log_option(parser)
    parser.set_defaults(handler=_doctor)


def _doctor(args: argparse.Namespace, start_time: float) -> int:
    from aioengine.commands.doctor import doctor

    return 0 if doctor(args.model) else 1
