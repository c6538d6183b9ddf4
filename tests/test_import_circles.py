"""No module imports itself by way of others, wherever the imports stand: at the top, for types only, or in a function."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.test_import_direction import modules

# What is left, each with the modules that import each other. The list only gets shorter.
KNOWN_CIRCLES: tuple[frozenset[str], ...] = (
    frozenset({"aioengine.core.invariants", "aioengine.core.scheduler"}),
    frozenset({"aioengine.engine.async_engine", "aioengine.engine.event_control"}),
    frozenset({"aioengine.layers.linear", "aioengine.layers.weight_format"}),
    frozenset({"aioengine.models.convert", "aioengine.models.tokenizer", "aioengine.models.tokenizer_files"}),
    frozenset({"aioengine.worker.device", "aioengine.worker.device_pipeline", "aioengine.worker.input_batch", "aioengine.worker.pipeline"}),
    frozenset({"aioengine_bench.kernel_cases", "aioengine_bench.native_kernels"}),
)

Graph = dict[str, set[str]]


def imported(path: Path, known: set[str]) -> set[str]:
    """The modules of ours that a file names in an import; a name of a package may be a module in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else str(node.module))
    return found & known


def import_graph() -> Graph:
    """Without `aioengine/__init__.py`, which stands above all: its names are loaded on first use."""
    paths = {name: path for name, path in modules() if name != "aioengine"}
    return {name: imported(path, set(paths)) - {name} for name, path in paths.items()}


def circles(graph: Graph) -> list[frozenset[str]]:
    """The sets of modules that can all be reached from each other."""
    reached = {name: _reachable(graph, name) for name in graph}
    found = {frozenset({other for other in reached[name] if name in reached[other]} | {name}) for name in graph if name in reached[name]}
    return sorted(found, key=sorted)


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        new = graph[left.pop()] - seen
        seen |= new
        left += new
    return seen


def test_no_module_imports_itself_by_way_of_others() -> None:
    new = [sorted(circle) for circle in circles(import_graph()) if not any(circle <= known for known in KNOWN_CIRCLES)]
    assert not new, f"import circles: {new}"


def test_a_circle_that_is_gone_is_taken_off_the_list() -> None:
    found = circles(import_graph())
    gone = [sorted(known) for known in KNOWN_CIRCLES if known not in found]
    assert not gone, f"KNOWN_CIRCLES still lists, in whole or in part: {gone}"


def test_circles_are_found_however_long_and_a_plain_hierarchy_has_none() -> None:
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [frozenset("abc")]
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"d", "a"}, "d": {"c"}}) == [frozenset("ab"), frozenset("cd")]


def test_imports_are_seen_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import json, ours.a\nfrom ours import b\nfrom ours.c import something\n"
        "if TYPE_CHECKING:\n    from ours.d import Type\ndef f():\n    from ours import e\n"
    )
    assert imported(path, {"ours", *(f"ours.{name}" for name in "abcdef")}) == {f"ours.{name}" for name in "abcde"}
