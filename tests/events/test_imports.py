"""The parts that observers use elsewhere (a dashboard, a replay) stay light: no torch, no textual."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"numpy", "rich", "textual", "torch", "transformers"}


def modules_of(package: str) -> list[str]:
    return [package, *(module.name for module in pkgutil.walk_packages(import_module(package).__path__, package + "."))]


def loaded_with(modules: list[str]) -> set[str]:
    """The top-level modules of a fresh interpreter that has imported `modules`."""
    code = f"import sys, {', '.join(modules)}; print(*{{name.split('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(result.stdout.split())


@pytest.mark.parametrize("package", ["aioengine.core", "aioengine.events"])
def test_neither_torch_nor_textual_is_imported(package: str) -> None:
    modules = modules_of(package)
    assert len(modules) > 3
    assert not loaded_with(modules) & HEAVY


def test_the_core_knows_no_event_loop() -> None:
    assert "asyncio" not in loaded_with(modules_of("aioengine.core"))


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_with(["aioengine"]) & (HEAVY | {"asyncio", "msgspec", "orjson"})
