"""The arguments of `aioengine top`; what it does is in the modules beside this one, imported when the arguments are good."""

from __future__ import annotations

import argparse
from typing import Any

from aioengine.commands import options


def add_top(commands: Any) -> None:
    """Add the command `top`."""
    parser = commands.add_parser(
        "top",
        help="watch an engine: every step, request and KV block",
        description="Watch an engine live, or replay a recording: every step, every request, every KV block.",
        usage="aioengine top [options] [ADDRESS ... | FILE | --demo | --tour]",
        epilog="""\
examples:
  aioengine top --tour                                 ten scenes that explain what such an engine does
  aioengine top --demo                                 an engine with the built-in model and varied traffic
  aioengine chat --events auto                         an engine to watch; then, on another terminal:
  aioengine top                                        your engine; if there are several, a list of them
  aioengine top /tmp/a.sock /tmp/b.sock                the engines at these addresses as a list
  aioengine top steps.jsonl                            replay what --record wrote
  aioengine top steps.jsonl --verify                   and run it again: does every frame come out the same?
  aioengine top steps.jsonl --report out.html --trace out.json
  aioengine top before.jsonl after.jsonl --compare     two recordings side by side
  aioengine top /tmp/e.sock --once --json              one state, for scripts
""",
    )
    parser.add_argument(
        "addresses",
        metavar="ADDRESS",
        nargs="*",
        help="a Unix socket's path, tcp:HOST:PORT, or a recording's path (default: the engines of yours that publish)",
    )
    parser.add_argument("--demo", action="store_true", help="start an engine with live traffic, and watch it")
    parser.add_argument("--tour", action="store_true", help="show, in ten scenes, what such an engine does; no model is needed")
    parser.add_argument("--once", action="store_true", help="print one state and leave")
    parser.add_argument("--json", action="store_true", help="print states as JSON, one a line")
    parser.add_argument("--trace", metavar="FILE", help="write a recording as a Chrome trace, for ui.perfetto.dev (.gz: compressed)")
    parser.add_argument("--report", metavar="FILE", help="write a recording as one HTML page that needs nothing else")
    parser.add_argument("--compare", action="store_true", help="two recordings side by side, with their differences")
    parser.add_argument("--verify", action="store_true", help="run a recording again, and say whether every frame came out the same")
    parser.add_argument("--web", action="store_true", help="serve the dashboard as a web page (needs aioengine[web])")
    parser.add_argument("--host", metavar="NAME", default="localhost", help="where --web listens (default: localhost, this machine alone)")
    parser.add_argument("--port", metavar="N", type=int, default=8000, help="port of --web (default: 8000)")
    parser.add_argument(
        "--theme", choices=("dark", "light", "high-contrast", "colour-blind", "ansi"), default="dark", help="colours (default: dark)"
    )
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII alone (by itself where the locale is not UTF-8)")
    parser.add_argument("--refresh", metavar="HZ", type=float, default=4.0, help="pictures a second, 0.5 to 10 (default: 4)")
    parser.add_argument("--events-token", metavar="TOKEN", help="for an engine over TCP (default: AIOENGINE_EVENTS_TOKEN)")
    options.add_model_option(parser)
    options.add_log_option(parser)
    options.add_engine_options(parser)
    parser.set_defaults(handler=_top, parser=parser)


def _top(args: argparse.Namespace, start_time: float) -> None:
    num_sources = args.demo + args.tour + bool(args.addresses)
    if num_sources > 1:
        args.parser.error(f"argument --{'tour' if args.tour else 'demo'}: not allowed with another source")
    if args.tour and (args.once or args.json or args.web):
        args.parser.error("argument --tour: not allowed with --once, --json and --web")
    if args.compare or args.trace is not None or args.report is not None:
        _top_runs(args)
        return
    if args.web and (args.once or args.json):
        args.parser.error("argument --web: not allowed with --once and --json")
    if args.verify and (args.demo or args.tour or args.web or args.json or len(args.addresses) != 1):
        args.parser.error("argument --verify: needs one recording, and is not allowed with --web and --json")
    if not 0.5 <= args.refresh <= 10:
        args.parser.error(f"argument --refresh: must be from 0.5 to 10, got {args.refresh:g}")
    for name, value in options.DEMO_SETTINGS.items():
        vars(args).setdefault(f"engine_{name}", value)
    config = options.engine_config(args)

    from aioengine.commands.on_screen import draws_ascii
    from aioengine.commands.top import TopSettings, top

    top(
        TopSettings(
            addresses=tuple(args.addresses),
            demo=args.demo,
            tour=args.tour,
            once=args.once,
            as_json=args.json,
            web=args.web,
            host=args.host,
            port=args.port,
            theme=args.theme,
            refresh=args.refresh,
            ascii_only=draws_ascii(asked=args.ascii),
            token=options.events_token(args.events_token),
            demo_config=config,
            verify=args.verify,
        )
    )


def _top_runs(args: argparse.Namespace) -> None:
    """What is made of whole recordings."""
    name = "--compare" if args.compare else "--trace" if args.trace is not None else "--report"
    for other in ("demo", "tour", "web", "verify", *(("trace", "report", "once") if args.compare else ("once", "json"))):
        if getattr(args, other):
            args.parser.error(f"argument {name}: not allowed with --{other}")
    count = 2 if args.compare else 1
    if len(args.addresses) != count:
        args.parser.error(f"argument {name}: {'two recordings are' if count == 2 else 'one recording is'} needed")

    from aioengine.commands.on_screen import draws_ascii
    from aioengine.commands.top_runs import compare_runs, export_run

    if args.compare:
        compare_runs(*args.addresses, as_json=args.json, theme=args.theme, ascii_only=draws_ascii(asked=args.ascii))
    else:
        export_run(args.addresses[0], trace=args.trace, report=args.report)
