"""Graphs, bars, lanes, grids and tables as lines of text."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine_tui.model.rows import Lanes, RequestRow, StepRecord
from aioengine_tui.widgets.graph import bar, graph_lines, graph_rows, round_up
from aioengine_tui.widgets.lanes import lane_lines, lane_window
from aioengine_tui.widgets.request_table import Moment, request_columns, token_bar
from aioengine_tui.widgets.scroll import ScrollState
from aioengine_tui.widgets.step_rows import StepRow, budget_bar, kind_tokens, step_header, step_line
from aioengine_tui.widgets.table import choose_columns, header_line, row_line, sorted_rows
from aioengine_tui.widgets.text import line_text, width_of
from tests.tui.support import busy_state


# ---------------------------------------------------------------------------------------------------- graphs and bars
def test_a_graph_grows_from_below_with_the_newest_value_at_the_right() -> None:
    assert graph_rows([0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4], width=6, height=2, top=4) == ["     ⢸", "    ⢠⣿"]
    assert graph_rows([0.5], width=3, height=1, top=1.0) == ["⣤⣤⣤"]  # a value is held where there is more room than values


def test_a_graph_never_draws_something_as_nothing() -> None:
    assert graph_rows([1e-9, 1e-9, 100.0, 100.0, None, None, 0.0, 0.0], width=4, height=1) == ["⣀⣿  "]


@pytest.mark.parametrize("width", [1, 7, 30, 61, 120, 400])
def test_a_graph_shows_the_whole_span_at_any_width(width: int) -> None:
    """One narrow peak at the beginning and one in the middle: they stand at the left end and in the middle."""
    values: list[float | None] = [0.0] * 240
    values[0] = values[120] = 100.0
    (row,) = graph_rows(values, width=width, height=1)
    assert len(row) == width
    assert row[0] != " "
    assert row[width // 2] != " "
    assert {row.find(cell) for cell in row[1:] if cell != " "} <= {*range(width // 2 - 1, width // 2 + 2 + width // 240), 0}


@given(st.lists(st.none() | st.floats(0, 1e9), max_size=250), st.integers(10, 120), st.integers(1, 12))
def test_a_graph_with_axes_takes_its_place_and_no_more(values: list[float | None], width: int, height: int) -> None:
    lines = [
        line_text(line)
        for line in graph_lines(values, width=width, height=height, span=("2m ago", "1m"), form=lambda value: f"{value:.2g}"[:5])
    ]
    assert len(lines) == height
    assert all(width_of(line) == width for line in lines)
    if width >= 26 and height >= 3:
        assert lines[-1].strip().startswith("└2m ago")
        assert lines[-1].endswith("now")


@given(st.floats(1e-6, 1e12))
def test_the_end_of_a_scale_is_round_and_not_far_above(value: float) -> None:
    top = round_up(value)
    assert value * 0.999 <= top <= value * 1.6
    assert float(f"{top:.2g}") == pytest.approx(top)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(5, 60))
def test_a_bar_is_right_to_a_cell(shares: list[float], width: int) -> None:
    total = sum(shares)
    if total > 1:
        shares = [share / total for share in shares]
    fills = "abcde"
    text = line_text(bar([(share, fills[index], "text") for index, share in enumerate(shares)], width=width))
    assert len(text) == width
    present = sum(share > 0 for share in shares)
    assert abs(width - text.count("·") - sum(shares) * width) <= max(1, present)
    assert all(fills[index] in text for index, share in enumerate(shares) if share > 0)


# ---------------------------------------------------------------------------------------------------- lanes
def _step(step_id: int, start: float) -> StepRecord:
    template = busy_state().steps[0]
    lanes = Lanes((start, start + 0.001), (start + 0.001, start + 0.007), (start + 0.007, start + 0.008), (start + 0.009, start + 0.010))
    return StepRecord(
        **{**{name: getattr(template, name) for name in StepRecord.__slots__}, "step_id": step_id, "time": start, "lanes": lanes}
    )


def test_lanes_show_the_phases_of_steps_below_each_other() -> None:
    steps = [_step(1, 0.0), _step(2, 0.010)]
    window = lane_window(steps, num_steps=6)
    assert window == (0.0, 0.020)
    lines = [line_text(line).rstrip() for line in lane_lines(steps, start=window[0], end=window[1], width=29)]
    assert lines == [
        "step     1         2",
        "schedule ░         ▚",
        "execute   ░░░░░░    ██████",
        "sample          ░         ▓",
        "update            ░         ▒",
        "         └0──────────────────",
    ]


def test_work_shorter_than_a_cell_is_still_seen() -> None:
    lines = lane_lines([_step(2, 0.0)], start=0.0, end=10.0, width=19)
    assert [line_text(line)[9:].rstrip() for line in lines[:5]] == ["2", "▚", "█", "▓", "▒"]


# ---------------------------------------------------------------------------------------------------- tables
@dataclass
class Item:
    name: str
    value: int | None


def test_the_least_important_columns_go_first_and_no_number_is_cut() -> None:
    columns = request_columns(Moment())
    for width in range(12, 200):
        chosen = choose_columns(columns, width)
        assert sum(size + 1 for _, size in chosen) - 1 <= width
        assert all(size >= column.width for column, size in chosen)
    assert [column.name for column, _ in choose_columns(columns, 60)] == [
        "request",
        "state",
        "step",
        "tokens",
        "prompt",
        "output",
        "blocks",
    ]
    assert len(choose_columns(columns, 160)) == len(columns)


def test_rows_without_a_value_come_last_in_both_directions() -> None:
    state = busy_state()
    ttft = next(column for column in request_columns(Moment()) if column.name == "ttft")
    rows = sorted_rows(list(state.rows()), ttft, reverse=False)
    backwards = sorted_rows(list(state.rows()), ttft, reverse=True)
    assert [row.ttft is None for row in rows] == sorted(row.ttft is None for row in rows)
    assert [row.ttft is None for row in backwards] == sorted(row.ttft is None for row in backwards)
    known = [row.ttft for row in rows if row.ttft is not None]
    assert known == sorted(known)


def test_table_lines_have_the_width_of_the_table() -> None:
    state = busy_state()
    moment = Moment(state.now, state.last_step_id)
    for width in (60, 80, 160):
        chosen = choose_columns(request_columns(moment), width)
        table_width = sum(size + 1 for _, size in chosen) - 1
        assert table_width == width
        assert width_of(line_text(header_line(chosen, sort="age", reverse=True))) == width
        for row in state.rows():
            assert width_of(line_text(row_line(chosen, row, under_cursor=False))) == width


def test_the_token_bar_shows_what_is_cached_computed_and_to_come() -> None:
    row = RequestRow("r", arrival_time=0.0, num_prompt_tokens=20, max_tokens=20)
    assert line_text(token_bar(row, 8)) == "----····"
    row.state, row.num_cached_tokens, row.num_computed_tokens = "running", 10, 15
    assert line_text(token_bar(row, 8)) == "░░█-····"
    row.state, row.finish_reason = "finished", "abort"  # what was never computed is not shown as done
    assert line_text(token_bar(row, 8)) == "░░█-····"
    row.num_computed_tokens, row.num_output_tokens = 29, 10
    assert line_text(token_bar(row, 8)) == "░░██▒▒··"


# ---------------------------------------------------------------------------------------------------- steps
def test_the_budget_is_filled_by_kind() -> None:
    step = busy_state().step(24)
    assert step is not None
    assert kind_tokens(step) == {"prefill": 0, "chunk": 17, "decode": 2, "resumed": 13}
    assert line_text(budget_bar(step, 32)) == "▓" * 17 + "▒" * 2 + "▚" * 13


def test_a_step_is_a_row() -> None:
    step = busy_state().step(24)
    assert step is not None
    assert line_text(step_header(80)).rstrip() == "   step tokens budget   reqs +new ~res !pre xend   latency   since stopped by"
    assert (
        line_text(step_line(StepRow(step, 0.02), 80)).rstrip()
        == "     24     32 ▓▓▓▓▒▚▚▚    4    1    1    ·    1    20.0ms  20.0ms budget"
    )


# ---------------------------------------------------------------------------------------------------- scrolling
def test_a_list_that_follows_its_end_stops_when_the_cursor_is_moved_away() -> None:
    scroll = ScrollState(follow_end=True)
    assert scroll.fit(10, 4) == range(6, 10)
    assert scroll.cursor == 9
    scroll.move(-2)
    scroll.fit(12, 4)
    assert (scroll.cursor, scroll.is_following) == (7, False)
    scroll.shift(3)
    scroll.fit(12, 4)
    assert scroll.cursor == 4
    scroll.go(1 << 60)
    assert scroll.fit(20, 4) == range(16, 20)


@given(st.lists(st.tuples(st.sampled_from(["move", "page", "go", "fit"]), st.integers(-30, 30)), max_size=30))
def test_the_cursor_is_always_in_the_window(actions: list[tuple[str, int]]) -> None:
    scroll = ScrollState()
    count, height = 20, 5
    scroll.fit(count, height)
    for name, value in actions:
        if name == "fit":
            count, height = abs(value), 1 + abs(value) % 7
        else:
            getattr(scroll, name)(value)
        visible = scroll.fit(count, height)
        assert len(visible) == min(count, height)
        assert count == 0 or scroll.cursor in visible
