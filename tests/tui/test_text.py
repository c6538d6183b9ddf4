"""Text that fits its cells, and numbers that say when they do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine_tui.widgets.text import (
    CLIPPED,
    Part,
    beside,
    clean,
    fit,
    fit_line,
    fit_middle,
    line_text,
    number,
    pack,
    percent,
    rule,
    seconds,
    side_by_side,
    width_of,
    wrap,
)


@given(st.text(max_size=40), st.integers(1, 30))
def test_text_takes_exactly_its_cells(text: str, width: int) -> None:
    text = clean(text)
    assert width_of(fit(text, width)) == width
    assert width_of(fit_middle(text, width)) == width
    if CLIPPED not in text:
        assert (CLIPPED in fit(text, width)) == (width_of(text) > width)


@given(st.integers(-(10**15), 10**15), st.integers(1, 12))
def test_a_number_is_never_a_plausible_wrong_number(value: int, width: int) -> None:
    shown = number(value, width)
    assert len(shown) == width
    text = shown.strip()
    if text == str(value):
        return
    if text == CLIPPED:
        return
    unit = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[text[-1]]
    digits = len(text[:-1].partition(".")[2])
    assert abs(float(text[:-1])) >= 1
    assert abs(float(text[:-1]) * unit - value) <= unit * 10**-digits / 2 * 1.001


@pytest.mark.parametrize(
    ("value", "width", "shown"),
    [
        (None, 3, "  -"),
        (7, 3, "  7"),
        (1234, 4, "1234"),
        (12345, 4, " 12k"),
        (1234, 3, " 1k"),
        (99999, 2, " …"),
        (0.5, 4, "0.50"),
        (73.94, 5, " 73.9"),
    ],
)
def test_numbers(value: float | None, width: int, shown: str) -> None:
    assert number(value, width) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0us"),
        (0.000444, "444us"),
        (0.001, "1.0ms"),
        (0.0123, "12.3ms"),
        (0.34, "340ms"),
        (2.5, "2.50s"),
        (187, "3m07s"),
        (7500, "2h05m"),
        (90000, "1d01h"),
    ],
)
def test_durations(value: float | None, shown: str) -> None:
    assert seconds(value) == shown


@pytest.mark.parametrize(
    ("share", "shown"), [(None, "-"), (0.0, "0.0%"), (1.0, "100%"), (0.9996, ">99.9%"), (0.0001, "<0.1%"), (0.4237, "42.4%")]
)
def test_nothing_and_everything_are_not_said_of_nearly(share: float | None, shown: str) -> None:
    assert percent(share) == shown


def test_other_peoples_text_cannot_move_the_cursor_or_turn_the_line() -> None:
    assert clean("a\x1b[2Jb\nc\u202ed") == "a·[2Jb·c·d"


def test_a_line_that_is_cut_says_so() -> None:
    line = [Part("blocks "), Part("1234567", "value")]
    assert line_text(fit_line(line, 14)) == "blocks 1234567"
    assert line_text(fit_line(line, 10)) == "blocks …  "  # no digit of a number that lost some
    assert line_text(fit_line([Part("abc"), Part("456")], 3)) == "ab…"
    assert line_text(fit_line([Part("12")], 4)) == "12  "


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("evicted 71", 9, "evicted …"),
        ("18 of 34567 blocks", 9, "18 of …  "),
        ("x 12.5ms", 6, "x …   "),
        ("free 4  evicted 16", 8, "free 4 …"),
        ("load-12345", 7, "load-1…"),  # an id
    ],
)
def test_a_number_that_would_lose_digits_goes_altogether(text: str, width: int, shown: str) -> None:
    assert fit(text, width) == shown


def test_a_line_that_fits_already_is_taken_as_it_is() -> None:
    once = fit_line([Part("blocks "), Part("123", "value")], 14)
    assert fit_line(once, 14) is once
    assert line_text(fit_line(once, 9)) == "blocks … "
    assert line_text(fit_line([*once, Part("more")], 18)) == "blocks 123    more"


def test_the_mark_does_not_stand_right_behind_a_whole_number() -> None:
    assert line_text(fit_line([Part("step 27"), Part("   owners")], 8)) == "step 27 "
    assert line_text(fit_line([Part("step 27"), Part("   owners")], 9)) == "step 27 …"


@given(st.lists(st.text("abc 12", min_size=1, max_size=9), min_size=1, max_size=8), st.integers(1, 40), st.integers(1, 3))
def test_packed_items_are_whole_or_left_out(texts: list[str], width: int, max_lines: int) -> None:
    lines = [line_text(line) for line in pack([[Part(text)] for text in texts], width, max_lines=max_lines, gap="|")]
    assert len(lines) <= max_lines
    assert all(width_of(line) <= width for line in lines)
    items = [item for line in lines for item in line.split("|") if item]
    assert (
        items == texts
        or (items[-1:] == [CLIPPED] and items[:-1] == texts[: len(items) - 1])
        or (items == texts[: len(items)] and width < 3)
    )


@given(st.text("ab 名", max_size=60), st.integers(2, 20))
def test_wrapped_text_loses_nothing_but_blanks(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert all(width_of(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_two_ends_of_a_line() -> None:
    assert line_text(beside([Part("left")], [Part("right")], 12)) == "left   right"
    assert line_text(beside([Part("left")], [Part("right")], 7)) == "left   "


def test_a_heading_gives_up_its_title_before_its_value() -> None:
    assert line_text(rule("steps/s", 20, "48.1")) == "─ steps/s ──── 48.1 "
    assert line_text(rule("prefix cache hits", 16, "48.1%")) == "─ pref… ─ 48.1% "


def test_blocks_side_by_side_keep_their_columns() -> None:
    lines = side_by_side([[[Part("a")], [Part("bb")]], [[Part("long text")]]], [3, 5])
    assert [line_text(line) for line in lines] == ["a   long…", "bb       "]
