"""Who may import whom, checked on the source text: imports point down, and the light parts stay light."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# What each part may import of ours, besides itself. A part is a module or package right under `aioengine`, one of the
# other packages by its short name, or the one module named here that others may know while its package is above them.
BASE = {
    *("errors", "printable", "checks", "config", "resolved_config", "sampling_params", "pooling_params", "outputs", "request"),
    "kv_cache_groups",
}
MODEL_SIDE = BASE | {"core", "kernels", "attention", "layers", "distributed"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "printable": set(),
    "checks": {"errors"},
    "config": {"errors", "checks", "printable", "kv_cache_groups", "resolved_config"},
    "resolved_config": {"errors", "printable", "kv_cache_groups"},
    "kv_cache_groups": set(),
    "sampling_params": {"errors", "checks"},
    "outputs": set(),
    "pooling_params": {"errors", "checks"},
    "request": {"outputs", "sampling_params", "pooling_params"},
    "core": BASE,
    "events": BASE | {"core", "package"},
    "kernels": set(),
    "distributed": {"errors"},
    "attention": BASE | {"core", "kernels", "layers"},
    "layers": BASE | {"core", "kernels", "attention", "distributed"},
    "checkpoint": BASE,
    "models": MODEL_SIDE | {"checkpoint"},
    "executor.base": BASE | {"core"},  # the contract, which the worker's side knows too
    "worker": MODEL_SIDE | {"checkpoint", "models", "executor.base"},
    "executor": MODEL_SIDE | {"checkpoint", "models", "worker", "executor.base"},
    "structured_output": BASE,
    "kv_connector": BASE,
    "engine": MODEL_SIDE
    | {"kv_connector", "checkpoint", "models", "worker", "executor", "executor.base", "structured_output", "events", "package"},
    "replay": MODEL_SIDE | {"checkpoint", "models", "executor", "executor.base", "structured_output", "engine", "events"},
    "server": BASE | {"core", "events", "kernels", "checkpoint", "models", "engine", "testing", "package"},
    "testing": MODEL_SIDE | {"checkpoint", "models", "worker", "executor", "executor.base", "events", "engine"},
    "package": BASE | {"core", "events", "engine"},  # aioengine/__init__.py: lazy, so the names are only for type checkers
    "commands": BASE
    | {"core", "events", "kernels", "checkpoint", "models", "engine", "package", "server", "replay", "bench", "tui", "testing"}
    | {"kv_connector"},  # the tour
    "cli": BASE | {"commands", "package"},
    "__main__": {"cli"},
    "tui": BASE | {"core", "events"},
    "bench": MODEL_SIDE
    | {"checkpoint", "models", "worker", "executor", "executor.base", "engine", "events", "structured_output", "testing", "package"}
    | {"replay"},
}

FORBIDDEN_LIBRARIES: dict[str, set[str]] = {
    "core": {"asyncio", "torch", "numpy", "time", "threading", "logging"},
    "events": {"torch", "numpy", "textual", "rich"},
    "kernels": {"transformers", "textual", "rich"},
    "server": {"torch", "numpy", "transformers", "jinja2"},
}
# The terminal is for those who draw on it.
DRAWS = {"commands", "tui"}
DRAWING_LIBRARIES = {"textual", "rich"}


# The rooms of the engine, each with those that it may know; what stands beside them (`async_engine`, `life`) is above all.
ENGINE_ROOMS: dict[str, set[str]] = {"loop": set(), "outputs": {"loop"}, "inputs": {"loop", "outputs"}}
ENGINE_COMMON = {"processed_input", "event_loops"}  # spoken by the rooms, and importing none of them


def modules() -> Iterator[tuple[str, Path]]:
    others = [(f"aioengine_{short}", ROOT / folder) for short, folder in (("kernels", "kernels"), ("tui", "tui"), ("bench", "benchmarks"))]
    for folder, parent in [("aioengine", ROOT), *others]:
        for path in sorted((parent / folder).rglob("*.py")):
            parts = [part for part in path.relative_to(parent).with_suffix("").parts if part != "__init__"]
            yield ".".join(parts), path


def part(name: str) -> str | None:
    """The part that a module of ours belongs to; None for other people's modules."""
    top, _, rest = name.partition(".")
    if top in ("aioengine_kernels", "aioengine_tui", "aioengine_bench"):
        return top.removeprefix("aioengine_")
    if top != "aioengine":
        return None
    return rest if rest == "executor.base" else rest.split(".")[0] or "package"


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}, line {node.lineno}: a relative import"
            assert node.module is not None
            yield node.module


@pytest.mark.parametrize(("name", "path"), [pytest.param(name, path, id=name) for name, path in modules()])
def test_imports_point_down(name: str, path: Path) -> None:
    own = part(name)
    assert own in ALLOWED, f"{name}: say in ALLOWED what the part {own!r} may import"
    for target in imports(path):
        other = part(target)
        if other is not None:
            assert other == own or other in ALLOWED[own], f"{name} imports {target}"
        else:
            library = target.split(".")[0]
            assert library not in FORBIDDEN_LIBRARIES.get(own, set()), f"{name} imports {target}"
            assert own in DRAWS or library not in DRAWING_LIBRARIES, f"{name} imports {target}"


def test_the_rules_have_no_cycle() -> None:
    """`package` aside, which imports lazily, the parts form a hierarchy (attention and layers are one level of it)."""
    level = {"attention": "layers"}
    below = {level.get(p, p): {level.get(q, q) for q in ALLOWED[p]} - {"package"} for p in ALLOWED if p != "package"}
    below["layers"] = {level.get(q, q) for q in ALLOWED["attention"] | ALLOWED["layers"]} - {"layers"}
    while below:
        lowest = {p for p, others in below.items() if not others & below.keys()}
        assert lowest, f"a cycle among {sorted(below)}"
        below = {p: others for p, others in below.items() if p not in lowest}


def test_the_rooms_of_the_engine_know_only_those_below_them() -> None:
    """Requests in know outputs out, both know the loop, and the loop knows neither; nor does what all of them share."""
    for name, path in modules():
        _, _, inside = name.partition("aioengine.engine.")
        room = inside.split(".")[0]
        if room not in ENGINE_ROOMS and room not in ENGINE_COMMON:
            continue
        allowed = ENGINE_ROOMS.get(room, set()) | ENGINE_COMMON | {room}
        for target in imports(path):
            other = target.removeprefix("aioengine.engine.").split(".")[0] if target.startswith("aioengine.engine.") else room
            assert other in allowed, f"{name} imports {target}"


def test_folders_with_generic_names_are_no_packages() -> None:
    for folder in ("kernels", "tui", "benchmarks", "tests"):
        assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/__init__.py would claim the import name {folder!r}"
