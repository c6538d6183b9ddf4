"""The list of a fleet as lines, for the screen and for where there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from aioengine.printable import printable
from aioengine_tui.fleet.members import FleetTotals, Member, add_up
from aioengine_tui.model.state import Gauges
from aioengine_tui.widgets.text import Line, Part, fit, fit_line, fit_middle, number, percent, seconds

_COLUMNS: tuple[tuple[str, int], ...] = (
    ("steps/s", 8), ("prompt/s", 9), ("out tok/s", 10), ("run", 5), ("wait", 5), ("pre", 4), ("KV", 7), ("hits", 7),
    ("TTFT p50", 9), ("p95", 8), ("ITL p50", 8), ("p95", 8),
)  # fmt: skip
"""Title and width, in the order in which they go when there is no room, the last first."""
_LEAST_NAME = 20
_STATES = {True: ("*", "good"), False: ("!", "alert")}


def fleet_lines(members: Sequence[Member], *, width: int, height: int, cursor: int | None) -> list[Line]:
    """Heads, a row an engine, the totals; at most `height` lines of `width` cells. cursor: the row that stands out."""
    columns = list(_COLUMNS)
    while columns and sum(size for _, size in columns) + _LEAST_NAME > width:
        columns.pop()
    name_width = width - sum(size for _, size in columns)
    head: Line = [Part(fit(" engine", name_width), "header"), *(Part(fit(title, size, right=True), "header") for title, size in columns)]
    room = max(1, height - 4)
    top = first_row(cursor, len(members), height)
    lines = [head]
    for index, member in enumerate(members[top : top + room], start=top):
        line = fit_line(_member_line(member, name_width, [size for _, size in columns]), width)
        lines.append([Part(part.text, "cursor") for part in line] if index == cursor else line)
    totals = add_up(members)
    lines.append([Part("─" * width, "border")])
    count = f"{totals.num_reached} of {totals.num_engines}" if totals.num_reached < totals.num_engines else f"{totals.num_engines}"
    lines.append([Part(fit(f" all {count}", name_width), "value"), *_values(totals, [size for _, size in columns], "value")])
    blocks = f" {totals.num_used_blocks} of {totals.num_total_blocks} KV blocks used, {totals.num_preemptions} preemptions in all"
    lines.append(fit_line([Part(blocks, "muted")], width))
    return lines[:height]


def first_row(cursor: int | None, num_members: int, height: int) -> int:
    """The member in the first row, so that the cursor's is on the screen."""
    room = max(1, height - 4)
    return 0 if cursor is None else max(0, min(cursor - room + 1, num_members - room))


def _member_line(member: Member, name_width: int, sizes: Sequence[int]) -> Line:
    sign, role = _STATES[member.is_reached]
    model = printable(member.state.model)
    name = f"{model}  {printable(member.address)}" if model else printable(member.address)
    line: Line = [Part(f" {sign} ", role), Part(fit(fit_middle(name, name_width - 4), name_width - 4) + " ", "text")]
    if member.is_reached:
        return [*line, *_values(member.gauges(), sizes, "text")]
    return [*line, Part(printable(member.problem or member.state.status.detail or "connecting"), "stale")]


def _values(one: Gauges | FleetTotals, sizes: Sequence[int], role: str) -> list[Part]:
    texts = [
        number(one.steps_per_s, 7), number(one.prefill_tokens_per_s, 8), number(one.decode_tokens_per_s, 9),
        number(one.num_running, 4), number(one.num_waiting, 4), number(one.num_preempted, 3), percent(one.kv_cache_usage),
        percent(one.prefix_hit_rate), seconds(one.ttft_p50), seconds(one.ttft_p95), seconds(one.itl_p50), seconds(one.itl_p95),
    ]  # fmt: skip
    return [Part(fit(text, size, right=True), role) for text, size in zip(texts, sizes, strict=False)]


def fleet_to_json(members: Sequence[Member]) -> dict[str, Any]:
    """Plain values: the gauges of each engine, and of all together."""
    return {
        "engines": [
            {
                "address": member.address,
                "model": member.state.model,
                "reached": member.is_reached,
                "problem": member.problem,
                "last_step_id": member.state.last_step_id,
                "gauges": dataclasses.asdict(member.gauges()) if member.is_reached else None,
            }
            for member in members
        ],
        "totals": dataclasses.asdict(add_up(members)),
    }
