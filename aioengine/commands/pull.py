"""`aioengine pull`: fetch a model into the cache, so that a later start needs no network."""

from __future__ import annotations

import sys

from aioengine.models.info import pull as pull_files
from aioengine.printable import printable


def pull(name: str) -> None:
    files = pull_files(name, progress=sys.stderr.isatty())
    size = sum(path.stat().st_size for path in files.weights)
    print(printable(f"{files.name}: {size / 1e6:.0f} MB of {files.format} weights, in {files.folder}"))
