from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Triton's interpreter is chosen when triton is first imported, so its tests run in a process of their own, which
# test_interpreter.py starts; in that process only they run.
collect_ignore = [path.name for path in HERE.glob("test_*.py")] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked slow here unless an -m expression was given."""
    if config.option.markexpr:
        return
    slow = [item for item in items if item.path.is_relative_to(HERE) and item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
