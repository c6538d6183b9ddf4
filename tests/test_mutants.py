"""The list of mutants stays true to the sources; the mutants themselves run by hand (`python tests/mutants.py`)."""

from __future__ import annotations

import dataclasses

from tests.mutants import read_mutants, what_is_stale


def test_every_mutant_can_still_be_made() -> None:
    stale = [problem for mutant in read_mutants() if (problem := what_is_stale(mutant)) is not None]
    assert not stale, "\n".join(["tests/mutants.toml no longer fits the sources:", *stale])


def test_there_are_mutants_of_every_part() -> None:
    mutants = read_mutants()
    assert len(mutants) >= 80
    for part in ("core", "engine", "worker", "events", "tui/", "cpu/src/parallel.cpp"):
        assert any(part in mutant.path for mutant in mutants), part


def test_no_mutant_is_listed_twice_or_changes_nothing() -> None:
    mutants = read_mutants()
    assert len({(mutant.path, mutant.old, mutant.new) for mutant in mutants}) == len(mutants)
    assert all(mutant.old != mutant.new for mutant in mutants)


def test_a_text_that_is_gone_or_stands_twice_is_told() -> None:
    mutant = read_mutants()[0]
    assert "stands there 0 times" in str(what_is_stale(dataclasses.replace(mutant, old="no such text, I hope")))
    assert "no such file" in str(what_is_stale(dataclasses.replace(mutant, path="aioengine/nowhere.py")))
    assert "do not exist" in str(what_is_stale(dataclasses.replace(mutant, tests=("tests/nowhere.py",))))
    assert what_is_stale(mutant) is None
