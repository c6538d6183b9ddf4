"""The options of `aioengine replay`. Imports nothing heavy: the help must answer at once."""

from __future__ import annotations

import argparse
from typing import Any

from aioengine.commands import options


def add_replay(commands: Any) -> None:
    """Add the command `replay`."""
    parser = commands.add_parser(
        "replay",
        help="run a recording again, and say whether it comes out the same",
        description="Run a recording again and compare: each frame of the scheduler, or each token of the model. Exit status 1 with the "
        "first difference, 2 if the recording cannot be run again.",
        usage="aioengine replay [options] FILE",
        epilog="""\
examples:
  aioengine replay steps.jsonl                         every frame, no model needed
  aioengine replay steps.jsonl --verify tokens         every token and log-probability, on a fresh worker (--events-text)
  aioengine replay steps.jsonl --until 417 --json
""",
    )
    parser.add_argument("file", metavar="FILE", help="what --record wrote")
    parser.add_argument("--verify", choices=("frames", "tokens"), default="frames", help="what to compare (default: frames)")
    parser.add_argument("--until", type=int, metavar="STEP", help="stop behind the frame of this step (default: all)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--model", metavar="MODEL", help="of --verify tokens: where the model is now (default: where it was)")
    options.add_log_option(parser)
    parser.set_defaults(handler=_replay, parser=parser)


def _replay(args: argparse.Namespace, start_time: float) -> int:
    if args.until is not None and args.until < 1:
        args.parser.error(f"argument --until: must be at least 1, got {args.until}")
    if args.model is not None and args.verify != "tokens":
        args.parser.error("argument --model: needs --verify tokens")

    from aioengine.commands.replay import ReplaySettings, replay

    settings = ReplaySettings(path=args.file, verify=args.verify, until=args.until, as_json=args.json, model=args.model)
    return 0 if replay(settings) else 1
