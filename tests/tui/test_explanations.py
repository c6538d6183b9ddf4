"""`?` answers for every label on every screen."""

from __future__ import annotations

import pytest

from aioengine.testing import in_virtual_time
from aioengine_tui.app import DashboardApp
from aioengine_tui.explanations import EXPLANATIONS, explain, explained, labels_of
from aioengine_tui.widgets.text import Part
from tests.tui.support import ListSource, busy_items
from tests.tui.test_app import press, running

WAYS = (("1",), ("2",), ("3",), ("4",), ("5",), ("6",), ("3", "enter"), ("2", "enter"), ("2", "enter", "tab"), ("4", "T"))
"""Keys that lead to each screen."""


def names_of(app: DashboardApp) -> set[str]:
    """Other people's words, which no table can know."""
    return {row.request_id for row in app.session.state.rows()}


@pytest.mark.parametrize("size", [(200, 60), (120, 40), (80, 24), (60, 16)], ids=lambda size: f"{size[0]}x{size[1]}")
@in_virtual_time
async def test_every_label_on_every_screen_is_explained(size: tuple[int, int]) -> None:
    async with running(ListSource(busy_items()), size=size) as (app, pilot):
        for keys in WAYS:
            await press(app, pilot, "escape", *keys)
            labels = set(labels_of(app.view.lines)) - names_of(app)
            assert len(labels) >= (0 if app.view.id in ("log", "waterfall") else 2), app.view.id
            assert not [label for label in labels if explain(label) is None], app.view.id


def test_explanations_are_one_or_two_plain_sentences() -> None:
    for label, words in EXPLANATIONS.items():
        assert label == label.lower().strip()
        assert words[0].isupper() or words.split(" ")[0].rstrip(":,") in ("fcfs", "max_num_seqs", "max_num_batched_tokens", "waiting"), (
            label
        )
        assert words.endswith(".")
        assert len(words) <= 240, label


def test_what_is_a_label_and_what_is_none() -> None:
    lines = [
        [Part("   step tokens   admission stopped by ↑", "header")],
        [Part("ref_cnt ", "muted"), Part("2", "value"), Part("   of 40", "muted")],
        [Part("─ ", "border"), Part("request alpha", "title")],
        [Part("slot_mapping", "key"), Part(" 12", "value")],
    ]
    assert list(labels_of(lines)) == ["step", "tokens", "admission stopped by", "ref_cnt", "request", "slot_mapping"]
    assert explained(["ref_cnt", "nonsense", "ref_cnt"]) == [("ref_cnt", EXPLANATIONS["ref_cnt"])]


@in_virtual_time
async def test_the_help_begins_with_the_words_of_the_screen_it_was_asked_on() -> None:
    async with running(ListSource(busy_items()), size=(120, 60)) as (app, pilot):
        await press(app, pilot, "4", "question_mark")
        assert app.view.id == "help"
        lines = app.view.text.splitlines()
        assert lines[0].startswith("─ the words on the screen KV blocks")
        assert any(line.startswith("ref_cnt ") and "How many requests hold the block" in line for line in lines)
        await press(app, pilot, "escape", "3", "f1")
        assert app.view.text.startswith("─ the words on the screen Batch")
        assert "everywhere" in app.view.text or "more lines below" in app.view.text
