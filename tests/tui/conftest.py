"""What several tests of the dashboard read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tui.runs import make_run


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of 60 requests that have ended."""
    path = tmp_path_factory.mktemp("recording") / "run.jsonl"
    make_run(num_requests=60, record=path)
    return path
