"""Puts one-line faults into a copy of the tree and sees whether the nearest tests notice: `python tests/mutants.py [WORD ...]`.

The faults are in `mutants.toml`; words choose those whose file or text holds one of them. Prints what survives, and ends with
status 1 if a mutant survives that should not, or dies that is said to survive, or stands nowhere any more. Takes about an hour
on two cores; no part of `make test`, which only looks whether every text is still in its file (`test_mutants.py`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutants.toml")
IMPORT_ROOTS = (".", "kernels", "tui", "benchmarks")
NATIVE = Path("kernels/aioengine_kernels/cpu")
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")

Outcome = Literal["killed", "survived", "hung"]


@dataclass(frozen=True, slots=True)
class Mutant:
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str  # why no test can notice it; empty: one must

    @property
    def is_native(self) -> bool:
        return self.path.endswith((".h", ".cpp"))

    def __str__(self) -> str:
        return f"{self.path}: {self.old!r} -> {self.new!r}"


def read_mutants() -> list[Mutant]:
    listed = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return [
        Mutant(path, mutant["old"], mutant["new"], tuple(mutant.get("tests", group["tests"]).split()), mutant.get("survives", ""))
        for path, group in listed.items()
        for mutant in group["mutants"]
    ]


def what_is_stale(mutant: Mutant) -> str | None:
    """Why a mutant cannot be made any more; None: it can."""
    file = ROOT / mutant.path
    if not file.is_file():
        return f"{mutant.path}: there is no such file; where is {mutant.old!r} now?"
    count = file.read_text(encoding="utf-8").count(mutant.old)
    if count != 1:
        return f"{mutant.path}: {mutant.old!r} stands there {count} times, not once"
    missing = [name for name in mutant.tests if not (ROOT / name.partition("::")[0]).exists()]
    return f"{mutant.path}: its tests {missing} do not exist" if missing else None


@contextmanager
def applied(mutant: Mutant, tree: Path) -> Iterator[None]:
    file = tree / mutant.path
    before = file.read_bytes()
    native = {library: library.read_bytes() for library in (tree / NATIVE).glob("_native*.so")} if mutant.is_native else {}
    file.write_text(before.decode().replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        if mutant.is_native:
            build_native(tree)
        yield
    finally:
        file.write_bytes(before)
        for library, content in native.items():
            library.write_bytes(content)


def build_native(tree: Path) -> None:
    """Compile what has changed. Raises RuntimeError if there is no library afterwards: a build that fails is skipped by setup.py."""
    for library in (tree / NATIVE).glob("_native*.so"):
        library.unlink()
    result = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, capture_output=True, text=True, check=False
    )
    if not list((tree / NATIVE).glob("_native*.so")):
        raise RuntimeError(f"the native library was not built:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")


def run_tests(tests: Sequence[str], tree: Path, *, timeout_s: float) -> tuple[Outcome, str]:
    """The outcome, and the end of what pytest says. Raises RuntimeError if pytest ran nothing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(tree / root) for root in IMPORT_ROOTS), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-n0", "-p", "no:cacheprovider", *tests]
    try:
        result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return "hung", f"no answer in {timeout_s:.0f} s"
    end = "\n".join(result.stdout.splitlines()[-4:])
    if result.returncode in (4, 5):  # wrong arguments; nothing collected
        raise RuntimeError(f"pytest {' '.join(tests)} ran nothing:\n{end}\n{result.stderr[-2000:]}")
    return ("survived" if result.returncode == 0 else "killed"), end


def judge(mutant: Mutant, tree: Path, *, timeout_s: float) -> tuple[str, bool, str]:
    """What became of a mutant, whether it should have, and the details."""
    with applied(mutant, tree):
        outcome, end = run_tests(mutant.tests, tree, timeout_s=timeout_s)
    if outcome == "survived":
        return "survived", bool(mutant.survives), mutant.survives or end
    return outcome, not mutant.survives, f"said to survive: {mutant.survives}\n{end}" if mutant.survives else ""


def copy_tree(folder: Path) -> Path:
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=_LEFT_OUT)
    return tree


def run_all(mutants: Sequence[Mutant], *, jobs: int, timeout_s: float, trust_tests: bool) -> bool:
    """Judge each, `jobs` at a time, in as many copies of the tree; whether all became what they should.

    trust_tests: do not run every selection of tests once without a mutant. A test that fails anyway kills every mutant.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            trees.put(copy_tree(Path(folder) / str(number)))

        def one(number: int) -> bool:
            mutant, tree, start = mutants[number], trees.get(), time.monotonic()
            try:
                outcome, is_right, detail = judge(mutant, tree, timeout_s=timeout_s)
            except RuntimeError as exc:
                outcome, is_right, detail = "error", False, str(exc)
            finally:
                trees.put(tree)
            mark = "" if is_right else "  <-- WRONG"
            print(f"[{number + 1}/{len(mutants)}] {outcome} in {time.monotonic() - start:.0f} s: {mutant}{mark}", flush=True)
            if detail:
                print("    " + detail.replace("\n", "\n    "), flush=True)
            return is_right

        for tests in () if trust_tests else sorted({mutant.tests for mutant in mutants}):
            tree = trees.get()
            outcome, end = run_tests(tests, tree, timeout_s=10 * timeout_s)
            trees.put(tree)
            if outcome != "survived":
                print(f"without any mutant, {' '.join(tests)} did not pass:\n{end}", flush=True)
                return False
        with ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(one, range(len(mutants))))
    print(f"{sum(results)} of {len(results)} mutants became what they should")
    return all(results)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants whose file or text holds one of these")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the tests of one mutant")
    parser.add_argument("--trust-tests", action="store_true", help="take it that the tests pass without a mutant")
    options = parser.parse_args(arguments)
    mutants = [m for m in read_mutants() if not options.words or any(word in str(m) for word in options.words)]
    stale = [problem for mutant in mutants if (problem := what_is_stale(mutant)) is not None]
    for problem in stale:
        print(problem)
    mutants = [mutant for mutant in mutants if what_is_stale(mutant) is None]
    all_right = run_all(mutants, jobs=options.jobs, timeout_s=options.timeout, trust_tests=options.trust_tests)
    return 0 if all_right and not stale else 1


if __name__ == "__main__":
    sys.exit(main())
