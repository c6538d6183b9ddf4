"""Terminals that can do less: no UTF-8, no cursor, a standard error that is a file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.testing import in_virtual_time
from aioengine_tui.terminals import as_ascii, can_draw, wants_ascii
from aioengine_tui.widgets.glyphs import BLOCK_GLYPHS, KIND_FILLS, LANE_FILLS
from aioengine_tui.widgets.text import width_of
from tests.tui.painted import PaintedApp
from tests.tui.support import ListSource, busy_items
from tests.tui.test_app import settle


@pytest.mark.parametrize(
    ("environ", "ascii_only", "drawn"),
    [
        ({}, False, True),
        ({"TERM": "xterm-256color", "LANG": "en_US.UTF-8"}, False, True),
        ({"TERM": "xterm-256color", "LANG": "C.UTF-8"}, False, True),
        ({"TERM": "xterm-256color", "LANG": "de_DE.utf8@euro"}, False, True),
        ({"TERM": "xterm", "LANG": "en_US.UTF-8", "LC_ALL": "C"}, True, True),
        ({"TERM": "xterm", "LANG": "de_DE.ISO-8859-1"}, True, True),
        ({"TERM": "xterm", "LC_CTYPE": "en_US.UTF-8", "LANG": "C"}, False, True),
        ({"TERM": "linux", "LANG": "en_US.UTF-8"}, True, True),
        ({"TERM": "dumb", "LANG": "en_US.UTF-8"}, True, False),
    ],
)
def test_what_the_environment_says(environ: dict[str, str], ascii_only: bool, drawn: bool) -> None:
    assert wants_ascii(environ) == ascii_only
    assert can_draw(environ) == drawn


@given(st.text())
def test_any_text_becomes_ascii_of_the_same_width(text: str) -> None:
    shown = as_ascii(text)
    assert shown.isascii()
    if text.isprintable():
        assert width_of(shown) == width_of(text)


@pytest.mark.parametrize("signs", [KIND_FILLS, LANE_FILLS, BLOCK_GLYPHS])
def test_states_are_told_apart_in_ascii_too(signs: dict[str, str]) -> None:
    assert len({as_ascii(sign) for sign in signs.values()}) == len(signs)


@in_virtual_time
async def test_nothing_but_ascii_is_painted() -> None:
    app = PaintedApp(ListSource(busy_items()), ascii_only=True)
    async with app.run_test(size=(120, 40)) as pilot:
        for key in ("1", "2", "3", "enter", "2", "enter", "4", "T", "5", "6", "question_mark"):
            await pilot.press(key)
            await settle(app, pilot)
            assert all(text.isascii() for text in app.terminal.texts), key
            assert any(text.strip() for text in app.terminal.texts)
