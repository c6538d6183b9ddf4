"""The `aioengine` command: argument parsing only. What a subcommand does is in `aioengine.commands`.

Nothing heavy is imported before the arguments are known to be good, so `--help` and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from aioengine import __version__
from aioengine.commands import options
from aioengine.errors import AioEngineError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

_DESCRIPTION = "An asyncio LLM engine: continuous batching over a paged KV cache, with every step visible."
_EPILOG = """\
examples:
  aioengine demo                                      eight prompts at once, streaming live
  aioengine generate "What is the capital of France?"
  aioengine chat --system "Answer in one sentence."

`aioengine COMMAND --help` describes a command and its options.
"""


class _Parser(argparse.ArgumentParser):
    """Errors take one line and point to the help: the usage of forty options helps nobody."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(shutil.get_terminal_size().columns, 120) - 2)

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        # Without its first line ("COMMAND") the list of subcommands speaks for itself.
        return text.partition("\n")[2] if isinstance(action, argparse._SubParsersAction) else text


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="aioengine", description=_DESCRIPTION, epilog=_EPILOG, usage="aioengine [--version] COMMAND ...")
    parser.add_argument("--version", action="version", version=f"aioengine {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", prog="aioengine")
    for add in (_add_generate, _add_chat, _add_demo, _add_pull):
        add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit status."""
    start_time = time.perf_counter()
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    _set_up_logging(args.log_level)
    try:
        args.handler(args, start_time)
        sys.stdout.flush()
    except AioEngineError as exc:
        print(f"aioengine: error: {exc}", file=sys.stderr)
        # ConfigError and InvalidRequestError are ValueErrors: the caller's mistake.
        return EXIT_USAGE if isinstance(exc, ValueError) else EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return 0


def _set_up_logging(level: str) -> None:
    import logging

    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)


# ---------------------------------------------------------------------------------------------------- generate
def _add_generate(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue one prompt, streaming to stdout",
        description="Continue one prompt and stream the text to stdout.",
        usage="aioengine generate [options] PROMPT",
        epilog="""\
examples:
  aioengine generate "What is the capital of France?"
  aioengine generate --raw --temperature 0.8 --seed 1 "Once upon a time"
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
    parser.add_argument("--stats", action="store_true", help="print sizes, latency and speed to stderr at the end")
    options.add_run_options(parser)
    options.add_sampling_options(parser, max_tokens=256, temperature=0.0)
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
            record=args.record,
            stats=args.stats,
            start_time=start_time,
        )
    )


# ---------------------------------------------------------------------------------------------------- chat
def _add_chat(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with the model",
        description="Talk with the model. Ctrl-C stops an answer, Ctrl-D or /exit leaves, /help lists the commands.",
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

    chat(ChatSettings(config=config, params=params, system=args.system, record=args.record, stats=args.stats))


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

    demo(DemoSettings(config=config, params=params, record=args.record, plain=args.plain, start_time=start_time))


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
    parser.add_argument("name", metavar="NAME", help='built-in alias ("smollm2") or Hugging Face repository')
    options.add_log_option(parser)
    parser.set_defaults(handler=_pull)


def _pull(args: argparse.Namespace, start_time: float) -> None:
    from aioengine.commands.pull import pull

    pull(args.name)
