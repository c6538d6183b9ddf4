"""No order comes from a set: checked on the source text. What is seen in tests/core/test_hash_seeds.py, for the whole package.

The order in which a set of strings is gone through differs from process to process. So nothing here goes through a set
but to sort it, to build another set, or to ask a question whose answer has no order.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "aioengine"

_SET_TYPE = re.compile(r"^(set|frozenset|AbstractSet|MutableSet|Set|collections\.abc\.Set)\b")
_SET_METHODS = {"union", "intersection", "difference", "symmetric_difference"}
_KEEPS_NO_ORDER = {"any", "all", "sum", "sorted", "set", "frozenset", "min", "max", "len", "Counter"}
_TAKES_AN_ORDER = {
    "list",
    "tuple",
    "enumerate",
    "iter",
    "zip",
    "map",
    "filter",
    "dict",
    "fromkeys",
    "deque",
    "join",
    "chain",
    "extend",
    "reversed",
    "fromiter",
    "gather",
}

# Where it cannot show: what is done to each of them is the same, and nobody sees in which order.
ALLOWED = {
    "self._clients",  # of the demo's workload: tasks are cancelled, and waited for
    "self._tasks",  # of the event server: as above
    "self._viewers",  # of the event server: each has a queue of its own
}

ID_SETS = {"finished_req_ids", "preempted_req_ids", "resumed_req_ids", "structured_output_request_ids"}
ID_SETS |= {"_finished_req_ids", "_lingering_req_ids", "lingering_req_ids"}


def is_set_type(annotation: ast.expr | None) -> bool:
    return annotation is not None and bool(_SET_TYPE.match(ast.unparse(annotation).strip("'\"")))


def annotated_names(tree: ast.AST, *, as_set: bool) -> set[str]:
    """The attributes, properties and functions of a module that are annotated as sets, or as something else."""
    names: set[str] = set()
    outer = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef))]
    fields = {id(child) for node in outer for child in node.body}  # other annotated names are local to a function
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and is_set_type(node.annotation) == as_set:
            if isinstance(node.target, ast.Attribute):
                names.add(node.target.attr)
            elif id(node) in fields:
                names.add(ast.unparse(node.target))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and is_set_type(node.returns) == as_set:
            names.add(node.name)
    return names


class Finder(ast.NodeVisitor):
    """Collects (line, expression) where an order is taken from a set."""

    def __init__(self, attributes: set[str]) -> None:
        self.attributes = attributes
        self.locals: set[str] = set()
        self.orderless: set[int] = set()  # ids of generator nodes whose consumer keeps no order
        self.found: list[tuple[int, str]] = []

    # ------------------------------------------------------------------ what is a set
    def is_set(self, node: ast.expr) -> bool:
        match node:
            case ast.Set() | ast.SetComp():
                return True
            case ast.Name(id=name):
                return name in self.locals
            case ast.Attribute(attr=name):
                return name in self.attributes
            case ast.Call(func=ast.Name(id=name)):
                return name in ("set", "frozenset") or name in self.attributes
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                return name in self.attributes or (name in _SET_METHODS and self.is_set(value))
            case ast.BinOp(left=left, right=right, op=ast.BitAnd() | ast.BitOr() | ast.Sub() | ast.BitXor()):
                return any(self.is_set(side) or _is_view(side) for side in (left, right))
            case ast.IfExp(body=body, orelse=orelse):
                return self.is_set(body) or self.is_set(orelse)
            case ast.BoolOp(values=values):
                return any(self.is_set(value) for value in values)
        return False

    # ------------------------------------------------------------------ scopes
    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self.locals = self.locals, set(self.locals)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self.locals |= {argument.arg for argument in arguments if is_set_type(argument.annotation)}
        self.locals -= {argument.arg for argument in arguments if not is_set_type(argument.annotation)}
        self.generic_visit(node)
        self.locals = outer

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name) and self.is_set(node.value):
                self.locals.add(target.id)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name) and is_set_type(node.annotation):
            self.locals.add(node.target.id)
        self.generic_visit(node)

    # ------------------------------------------------------------------ where an order is taken
    def take(self, node: ast.expr) -> None:
        if self.is_set(node):
            self.found.append((node.lineno, ast.unparse(node)))

    def visit_For(self, node: ast.For) -> None:
        self.take(node.iter)
        self.generic_visit(node)

    def _visit_comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.DictComp) -> None:
        if id(node) not in self.orderless:
            for generator in node.generators:
                self.take(generator.iter)
        self.generic_visit(node)

    visit_ListComp = visit_GeneratorExp = visit_DictComp = _visit_comprehension

    def visit_Starred(self, node: ast.Starred) -> None:
        self.take(node.value)
        self.generic_visit(node)

    def visit_Set(self, node: ast.Set) -> None:
        for element in node.elts:
            self.visit(element.value if isinstance(element, ast.Starred) else element)

    def visit_YieldFrom(self, node: ast.YieldFrom) -> None:
        self.take(node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add):
            self.take(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in _KEEPS_NO_ORDER:
            self.orderless |= {id(argument) for argument in node.args}
        elif name in _TAKES_AN_ORDER:
            for argument in node.args:
                self.take(argument)
        elif name == "pop" and not node.args and isinstance(node.func, ast.Attribute):
            self.take(node.func.value)
        self.generic_visit(node)


def _is_view(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("keys", "items")


def orders_from_sets(source: str, attributes: set[str]) -> list[tuple[int, str]]:
    finder = Finder(attributes)
    finder.visit(ast.parse(source))
    return finder.found


def violations() -> Iterator[str]:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    trees = [ast.parse(source) for source in sources.values()]
    attributes, others = (set[str]().union(*(annotated_names(tree, as_set=as_set) for tree in trees)) for as_set in (True, False))
    attributes -= others  # a name for both is not told apart
    assert attributes >= ID_SETS, "they are what an order would show in"
    for name, source in sources.items():
        for line, expression in orders_from_sets(source, attributes):
            if expression not in ALLOWED:
                yield f"aioengine/{name}, line {line}: the order of {expression} differs from process to process"


def test_nothing_takes_its_order_from_a_set() -> None:
    found = list(violations())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "for x in out.ids: f(x)",
        "for x in {f(), 2}: f(x)",
        "y = [f(x) for x in out.ids]",
        "y = {x: 1 for x in out.ids}",
        "y = f(g(x) for x in out.ids if x)",
        "y = list(out.ids)",
        "y = dict.fromkeys(out.ids)",
        "y = [*out.ids, 1]",
        "f(*out.ids)",
        "y += out.ids",
        "y.extend(out.ids)",
        "y = ', '.join(out.ids)",
        "y = next(iter(out.ids))",
        "y = out.ids.pop()",
        "def g(a: set[str]):\n    for x in a: f(x)",
        "def g():\n    a = set(f())\n    for x in a: f(x)",
        "def g():\n    a = b.keys() & c\n    return [x for x in a]",
        "for x in out.ids - other: f(x)",
        "for x in out.ids.union(other): f(x)",
        "for x in (out.ids if y else ()): f(x)",
        "def g():\n    yield from out.ids",
    ],
)
def test_an_order_from_a_set_is_seen(code: str) -> None:
    assert orders_from_sets(code, {"ids"})


@pytest.mark.parametrize(
    "code",
    [
        "for x in sorted(out.ids): f(x)",
        "y = all(x in a for x in out.ids)",
        "y = {f(x) for x in out.ids}",
        "y = frozenset(x for x in out.ids)",
        "y = x in out.ids and len(out.ids)",
        "y = out.ids | {1, 2}",
        "for x in a.keys(): f(x)",
        "def g(ids: list[str]):\n    for x in ids: f(x)",
        "y = {*out.ids, 1}",
        "y += 1",
    ],
)
def test_what_has_no_order_is_left_alone(code: str) -> None:
    assert not orders_from_sets(code, {"ids"})
