"""The columns of the request table."""

from __future__ import annotations

from dataclasses import dataclass

from aioengine_tui.model.rows import RequestRow
from aioengine_tui.widgets.glyphs import KIND_FILLS, KIND_LETTERS, NOTHING, STATE_LETTERS
from aioengine_tui.widgets.graph import bar
from aioengine_tui.widgets.table import Column, text_column
from aioengine_tui.widgets.text import Line, Part, fit, number, seconds

_PREFIX_FILL = "░"


@dataclass(slots=True)
class Moment:
    """Where the state stands: what ages and "this step" are measured against."""

    now: float = 0.0  # seconds of the engine's clock
    step_id: int = 0


def token_bar(row: RequestRow, width: int) -> Line:
    """The request's tokens as one bar over prompt and max_tokens: cached, computed prompt, prompt to come, output.

    After a preemption nothing is computed any more, and the bar shows it.
    """
    total = max(1, row.num_prompt_tokens + max(row.max_tokens, row.num_output_tokens))
    computed_prompt = min(row.num_prompt_tokens, row.num_computed_tokens)
    cached = min(row.num_cached_tokens, computed_prompt)
    computed_output = max(0, row.num_computed_tokens - row.num_prompt_tokens)
    known_output = max(row.num_output_tokens, computed_output)
    waiting_prompt = row.num_prompt_tokens - computed_prompt
    return bar(
        [
            (cached / total, _PREFIX_FILL, "prefix"),
            ((computed_prompt - cached) / total, KIND_FILLS["prefill"], "prefill"),
            (waiting_prompt / total, "-", "waiting"),
            (known_output / total, KIND_FILLS["decode"], "decode"),
        ],
        width=width,
    )


def state_text(row: RequestRow) -> str:
    """The state in a word; of an ended request the reason."""
    if row.state == "finished":
        return str(row.finish_reason or "unknown end")
    return "cleaning" if row.state == "cleaning_up" else row.state


def state_role(row: RequestRow) -> str:
    return "aborted" if row.finish_reason in ("abort", "error") else row.state


def request_columns(moment: Moment) -> tuple[Column[RequestRow], ...]:
    """All columns, in order; `moment` is read when a cell is made."""

    def state_cell(row: RequestRow, size: int) -> Line:
        role = state_role(row)
        return [Part(STATE_LETTERS[row.state] + " ", role), Part(fit(state_text(row), size - 2), role)]

    def step_cell(row: RequestRow, size: int) -> Line:
        if row.last_step_id != moment.step_id or row.last_step_kind is None or not row.is_live:
            return [Part(fit(NOTHING, size, right=True), "muted")]
        return [Part(number(row.last_step_tokens, size - 1) + KIND_LETTERS[row.last_step_kind], row.last_step_kind)]

    def count(name: str, title: str, width: int, attribute: str, importance: int) -> Column[RequestRow]:
        def plain(row: RequestRow) -> int:
            value = getattr(row, attribute)
            assert isinstance(value, int), attribute
            return value

        return Column(name, title, width, lambda row, size: [Part(number(plain(row), size))], plain, importance=importance)

    def duration_cell(value: float | None, size: int) -> Line:
        return [Part(fit(seconds(value), size, right=True), "text" if value is not None else "muted")]

    def this_step(row: RequestRow) -> int:
        return row.last_step_tokens if row.last_step_id == moment.step_id and row.is_live else 0

    return (
        text_column("request", "request", 9, lambda row: row.request_id, importance=100, max_width=28),
        Column("state", "state", 11, state_cell, state_text, importance=99, right=False),
        Column("step", "step", 5, step_cell, this_step, importance=98),
        Column("tokens", "tokens", 12, token_bar, lambda row: row.num_tokens, importance=96, right=False, max_width=56),
        count("prompt", "prompt", 6, "num_prompt_tokens", 90),
        count("cached", "cached", 6, "num_cached_tokens", 60),
        count("computed", "comp", 6, "num_computed_tokens", 70),
        count("output", "out", 5, "num_output_tokens", 95),
        count("max", "max", 5, "max_tokens", 30),
        count("blocks", "blk", 4, "num_blocks", 88),
        count("preemptions", "pre", 3, "num_preemptions", 40),
        count("priority", "pri", 3, "priority", 10),
        Column(
            "age",
            "age",
            6,
            lambda row, size: duration_cell(row.age(moment.now), size),
            lambda row: row.age(moment.now),
            importance=85,
        ),
        Column("wait", "wait", 6, lambda row, size: duration_cell(row.queue_wait, size), lambda row: row.queue_wait, importance=62),
        Column("ttft", "ttft", 6, lambda row, size: duration_cell(row.ttft, size), lambda row: row.ttft, importance=65),
        Column("rate", "tok/s", 5, lambda row, size: [Part(number(row.rate, size))], lambda row: row.rate, importance=80),
    )
