"""No module imports itself by way of others, wherever the imports stand: at the top, for types only, or in a function."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.test_import_direction import modules

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
    found = [sorted(circle) for circle in circles(import_graph())]
    assert not found, f"import circles: {found}"


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
