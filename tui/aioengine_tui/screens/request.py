"""A request's own page: where it stands, its life as a timeline, its block table, its sampling parameters, its text."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from textual.binding import Binding, BindingType

from aioengine.sampling_params import SamplingParams
from aioengine_tui.model.log import plural
from aioengine_tui.model.state import DashboardState, RequestRow
from aioengine_tui.screens.base import PageView
from aioengine_tui.session import Answer, Session
from aioengine_tui.table_file import ExportTable
from aioengine_tui.themes import Palette
from aioengine_tui.widgets.request_table import state_role, state_text, token_bar
from aioengine_tui.widgets.text import Hot, Line, Part, clean, fit, fit_line, number, pack, rule, seconds, side_by_side, wrap
from aioengine_tui.widgets.why_lines import why_section

_WIDE = 120
_DETAIL_COLUMN = 33  # of the timeline
_MILESTONE_ROLES = {
    "queued": "text", "scheduled": "prefill", "chunk": "chunk", "first_token": "good", "preempted": "preempted", "resumed": "resumed",
    "recomputed": "resumed", "finished": "good", "told_worker": "muted", "cleaned_up": "muted",
}  # fmt: skip
_MILESTONE_WORDS = {"first_token": "first token", "told_worker": "worker told", "cleaned_up": "cleaned up"}


class RequestView(PageView):
    screen_title: ClassVar[str] = "Request"
    key_hints: ClassVar[tuple[tuple[str, str], ...]] = (
        ("esc", "back"),
        ("↑↓", "scroll"),
        ("o", "all settings"),
        ("x", "abort"),
        ("e", "export"),
    )

    BINDINGS: ClassVar[list[BindingType]] = [Binding("o", "fold", "show or fold the settings that have their default", show=False)]

    def __init__(self, palette: Palette, session: Session, *, id: str) -> None:
        super().__init__(palette, session, id=id)
        self.request_id: str | None = None
        self.with_defaults = False

    def action_fold(self) -> None:
        self.with_defaults = not self.with_defaults
        self.draw()

    def open(self, request_id: str) -> None:
        self.request_id = self.session.selected = request_id
        self.scroll_state.go(0)

    def compose_page(self, state: DashboardState, width: int) -> list[Line]:
        row = state.row(self.request_id) if self.request_id is not None else None
        if row is None and self.request_id in self.session.answers:
            return _texts(None, self.session.answers[self.request_id], width)
        if row is None:
            name = clean(self.request_id or "")
            return [[Part(f"request {name} is not known here: not arrived yet, or ended too long ago to be kept", "muted")]]
        answer = self.session.answers.get(row.request_id)
        return page_lines(row, state, width, with_defaults=self.with_defaults, answer=answer)

    def export_table(self, state: DashboardState) -> ExportTable | None:
        row = state.row(self.request_id) if self.request_id is not None else None
        if row is None:
            return None
        return ExportTable(
            ["time", "step_id", "kind", "detail"], [[stone.time, stone.step_id, stone.kind, stone.detail] for stone in row.timeline]
        )


def page_lines(
    row: RequestRow, state: DashboardState, width: int, *, with_defaults: bool = False, answer: Answer | None = None
) -> list[Line]:
    """What is written and read comes first, then the life of the request, then what it was asked for and holds."""
    head = [*_head(row, state, width), *why_section(state, row.request_id, width)]
    if width < _WIDE:
        texts, timeline = _texts(row, answer, width), _timeline(row, width)
        return [*head, *texts, *timeline, *_params(row, width, with_defaults=with_defaults), *_blocks(row, width)]
    left = width // 2
    right = width - left - 2
    others = [*_params(row, right, with_defaults=with_defaults), *_blocks(row, right)]
    if answer is None and row.prompt is None and row.text is None:
        columns = [_timeline(row, left), [*others, *_texts(row, answer, right)]]
    else:
        columns = [_texts(row, answer, left), [*_timeline(row, right), *others]]
    return [*head, *side_by_side(columns, [left, right], gap=2)]


def _head(row: RequestRow, state: DashboardState, width: int) -> list[Line]:
    facts: list[tuple[str, str]] = [
        ("prompt", str(row.num_prompt_tokens)),
        ("cached", str(row.num_cached_tokens)),
        ("computed", str(row.num_computed_tokens)),
        ("output", f"{row.num_output_tokens} of {row.max_tokens}"),
        ("blocks", f"{row.num_blocks} (peak {row.num_peak_blocks})"),
    ]
    times: list[tuple[str, str]] = [
        ("age", seconds(row.age(state.now))),
        ("ttft", seconds(row.ttft)),
        ("tokens/s", number(row.rate, 6).strip()),
        ("preemptions", str(row.num_preemptions)),
        ("priority", str(row.priority)),
        ("stop reason", clean(str(row.stop_reason)) if row.stop_reason is not None else "-"),
    ]
    share = state.share_of(row) if row.is_live else None
    this_step = (
        f"{share[0]} token{'s' if share[0] > 1 else ''} ({share[1]}) in step {state.last_step_id}" if share else "not in the latest step"
    )
    state_line: Line = [Part(state_text(row), state_role(row)), Part(f"   {this_step}", "muted")]
    if row.told_in_step is not None:
        state_line.append(Part(f"   the worker was told in step {row.told_in_step}", "muted"))
    lines: list[Line] = [rule(f"request {clean(row.request_id)}", width), state_line]
    for group in (facts, times):
        lines += pack([[Part(f"{label} ", "muted"), Part(value, "value")] for label, value in group], width, max_lines=2, gap="   ")
    lines.append([Part("tokens ", "muted"), *token_bar(row, max(4, width - 7))])
    return [fit_line(line, width) for line in lines]


def _timeline(row: RequestRow, width: int) -> list[Line]:
    lines = [rule("timeline", width, f"{row.num_milestones_dropped} older left out" if row.num_milestones_dropped else "")]
    for stone in row.timeline:
        word = _MILESTONE_WORDS.get(stone.kind, stone.kind)
        step = f"step {stone.step_id}" if stone.step_id is not None else ""
        head: Line = [
            Part(f"+{fit(seconds(stone.time - row.arrival_time), 7)} ", "muted"), Part(fit(step, 12), "muted"),
            Part(fit(word, 12), _MILESTONE_ROLES.get(stone.kind, "text")),
        ]  # fmt: skip
        first, *others = wrap(clean(stone.detail), width - _DETAIL_COLUMN)
        lines += [fit_line([*head, Part(first)], width), *([Part(" " * _DETAIL_COLUMN), Part(text)] for text in others)]
    return lines


def _blocks(row: RequestRow, width: int) -> list[Line]:
    lines = [rule("block table", width, f"{row.num_blocks} blocks")]
    if not row.other_block_ids:
        text = " ".join(map(str, row.block_ids)) or "holds no block"
        return lines + [[Part(line, "block_used" if row.block_ids else "muted")] for line in wrap(text, width)]
    for group_id, table in enumerate(row.tables):
        num_behind = table.count(0)
        behind = f"{num_behind} behind its window, " if num_behind else ""
        lines.append([Part(f"KV-cache group {group_id}: {behind}{plural(len(table) - num_behind, 'block')}", "muted")])
        lines += [[Part(line, "block_used")] for line in wrap(" ".join(str(block_id) for block_id in table if block_id), width)]
    return lines


def _params(row: RequestRow, width: int, *, with_defaults: bool) -> list[Line]:
    lines = [rule("sampling parameters", width)]
    if row.sampling_params is None:
        return [*lines, [Part("not known: it was first scheduled before this viewer attached", "muted")]]
    defaults = SamplingParams()
    given: list[str] = []
    others: list[str] = []
    for field in dataclasses.fields(row.sampling_params):
        value = getattr(row.sampling_params, field.name)
        (given if value != getattr(defaults, field.name) else others).append(f"{field.name}={value!r}")
    lines += [[Part(line)] for line in wrap(clean("  ".join(given)) or "all have their defaults", width)]
    if with_defaults:
        return lines + [[Part(line, "muted")] for line in wrap(clean("defaults: " + "  ".join(others)), width)]
    return [*lines, [Hot(f"and {len(others)} that have their default (o shows them)", "muted", "fold")]] if others else lines


def _texts(row: RequestRow | None, answer: Answer | None, width: int) -> list[Line]:
    """Prompt and output as far as they are known: from events, or because the prompt was sent from here."""
    prompt = answer.prompt if answer is not None else row.prompt if row is not None else None
    output = answer.text if answer is not None else row.text if row is not None else None
    lines: list[Line] = []
    for title, text in (("prompt", prompt), ("output", output)):
        if text is not None:
            lines.append(rule(title, width))
            for paragraph in text.splitlines() or [""]:
                lines += [[Part(line)] for line in wrap(clean(paragraph), width)]
    if not lines:
        lines = [rule("text", width), [Part("the engine does not publish texts (it is asked for with --events-text)", "muted")]]
    return lines
