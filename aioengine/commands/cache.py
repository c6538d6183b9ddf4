"""`aioengine cache`: what engines keep on disk of their KV caches."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

from aioengine.errors import ConfigError
from aioengine.kv_connector.folder import StoreInfo, list_stores, prune
from aioengine.printable import printable

_DAY_S = 86400


def list_kept(folder: str, *, as_json: bool) -> None:
    """Print a line for each model and way of computing. Raises ConfigError."""
    stores = list_stores(_existing(folder))
    if as_json:
        print(json.dumps([dataclasses.asdict(info) for info in stores], indent=1))
        return
    if not stores:
        print(f"{printable(folder)}: no KV blocks are kept here")
        return
    print(f"{'MODEL':<24} {'WEIGHTS':<8} {'ISA':<9} {'KV DTYPE':<9} {'BLOCKS':>8} {'TOKENS':>9} {'MB':>8}  LAST USED")
    for info in stores:
        print(_line(info))
    print(f"{sum(info.num_bytes for info in stores) / 1e6:.0f} MB in all")


def _line(info: StoreInfo) -> str:
    key = info.key
    return (
        f"{printable(key.model)[:24]:<24} {printable(key.weights):<8} {printable(key.isa) or '-':<9} {printable(key.kv_cache_dtype):<9} "
        f"{info.num_blocks:>8} {info.num_blocks * key.block_size:>9} {info.num_bytes / 1e6:>8.1f}  {_ago(time.time() - info.used)}"
    )


def _ago(seconds: float) -> str:
    for size, unit in ((_DAY_S, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"


def prune_kept(folder: str, *, max_bytes: int | None, unused_days: float | None, as_json: bool) -> None:
    """Remove what is over `max_bytes` (None: no limit) and what was not used for `unused_days`. Raises ConfigError."""
    removed = prune(
        _existing(folder),
        max_bytes=sys.maxsize if max_bytes is None else max_bytes,
        unused_since=0.0 if unused_days is None else time.time() - unused_days * _DAY_S,
    )
    num_bytes = sum(segment.num_bytes for segment in removed)
    if as_json:
        print(json.dumps({"num_segments": len(removed), "num_bytes": num_bytes}))
    else:
        print(f"removed {num_bytes / 1e6:.1f} MB in {len(removed)} segments")


def _existing(folder: str) -> Path:
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{printable(folder)}: there is no such folder")
    return path
