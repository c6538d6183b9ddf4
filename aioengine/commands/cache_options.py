"""The options of `aioengine cache`. Imports nothing heavy: the help must answer at once."""

from __future__ import annotations

import argparse
from typing import Any

from aioengine.commands import options


def add_cache(commands: Any) -> None:
    """Add the command `cache`."""
    parser = commands.add_parser(
        "cache",
        help="look at the KV cache on disk (--kv-cache-dir), or make it smaller",
        description="Look at the KV cache that engines keep on disk (--kv-cache-dir), or make it smaller.",
        usage="aioengine cache ls DIR | aioengine cache prune [options] DIR",
        epilog="""\
examples:
  aioengine cache ls ~/kv
  aioengine cache prune ~/kv --max-bytes 2GiB          the longest unused blocks go first
  aioengine cache prune ~/kv --unused-for 30           what was not used for 30 days
  aioengine cache prune ~/kv --all
""",
    )
    parser.add_argument("action", choices=("ls", "prune"), help="ls: what is kept, by model. prune: remove blocks")
    parser.add_argument("folder", metavar="DIR", help="what --kv-cache-dir named")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--max-bytes", type=options.parse_size, metavar="SIZE", help="of prune: leave at most this much, such as 2GiB")
    parser.add_argument("--unused-for", type=float, metavar="DAYS", help="of prune: remove what was not used for so long")
    parser.add_argument("--all", action="store_true", help="of prune: remove everything")
    options.add_log_option(parser)
    parser.set_defaults(handler=_cache, parser=parser)


def _cache(args: argparse.Namespace, start_time: float) -> None:
    limits = [args.max_bytes is not None, args.unused_for is not None, args.all]
    if args.action == "ls" and any(limits):
        args.parser.error("arguments --max-bytes, --unused-for and --all: belong to prune")
    if args.action == "prune" and not any(limits):
        args.parser.error("prune: say what to remove, with --max-bytes, --unused-for or --all")
    if args.unused_for is not None and not 0 <= args.unused_for <= 36500:
        args.parser.error(f"argument --unused-for: must be days from 0 to 36500, got {args.unused_for}")

    from aioengine.commands import cache

    if args.action == "ls":
        cache.list_kept(args.folder, as_json=args.json)
    else:
        cache.prune_kept(args.folder, max_bytes=0 if args.all else args.max_bytes, unused_days=args.unused_for, as_json=args.json)
