"""`python -m aioengine` is the `aioengine` command."""

from __future__ import annotations

import sys

from aioengine.cli import main

if __name__ == "__main__":
    sys.exit(main())
