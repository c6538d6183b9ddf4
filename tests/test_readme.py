"""The table of tests/README.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent


def test_every_test_named_in_the_readme_exists() -> None:
    named = re.findall(r"`([a-z_0-9/]+\.py)(?:::(test_[a-z_0-9]+))?`", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert len(named) > 40
    lost = [
        f"{path}::{test}"
        for path, test in named
        if not (FOLDER / path).is_file() or (test and f"def {test}(" not in (FOLDER / path).read_text(encoding="utf-8"))
    ]
    assert lost == []
