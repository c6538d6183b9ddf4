"""Where the engine keeps what it fetched or converted. Free of torch."""

from __future__ import annotations

import os
from pathlib import Path

# The file that a converted folder's conversion writes last: a folder without it is unfinished, or somebody else's.
MARKER = "aioengine.json"


def cache_folder() -> Path:
    """$AIOENGINE_CACHE, else $XDG_CACHE_HOME/aioengine, else ~/.cache/aioengine."""
    own = os.environ.get("AIOENGINE_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "aioengine"
