"""The fields of a step for the frame inspector: what was sent, and what the worker does with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from aioengine.sampling_params import SamplingParams
from aioengine_tui.model.state import DashboardState, Share, StepRecord
from aioengine_tui.model.worker_half import Effect, WorkerHalf, WorkerRow, worker_half
from aioengine_tui.widgets.glyphs import KIND_LETTERS
from aioengine_tui.widgets.step_rows import STOP_WORDS
from aioengine_tui.widgets.text import Line, Part, clean, fit, seconds

_GLUE = "\N{NO-BREAK SPACE}"
_HIDDEN = "not told: token ids do not travel without --events-text"
NAME_WIDTH = 12
"""Characters of a request id in front of what is said about it."""

_EFFECT_WORDS = {
    "forget": ("- forget", "finished", "its row is free again"),
    "preempt": ("! preempt", "preempted", "its row is free, its parameters are kept"),
    "add": ("+ add", "prefill", "a row: prompt, parameters, block table"),
    "resume": ("~ resume", "resumed", "a row again; block table REPLACED by"),
    "append": ("  append", "decode", "blocks at the end of its table:"),
    "unchanged": ("  go on", "text", "only its position moves"),
}


@dataclass(frozen=True, slots=True)
class FrameField:
    """A label, which `explanations` explains; what it is, on the same line; and further lines, if there are any."""

    label: str
    summary: Line
    details: list[Line] = dataclasses.field(default_factory=list)


# ---------------------------------------------------------------------------------------------------- SchedulerOutput
def sent_fields(step: StepRecord, state: DashboardState) -> list[FrameField]:
    """`SchedulerOutput`, in the order of its definition, and what the event tells beside it."""
    shares = {share.request_id: share for share in step.shares}
    news = [shares[request_id] for request_id in step.new_ids if request_id in shares]
    cached = [share for share in step.shares if share.request_id not in step.new_ids]
    drafts = [share for share in step.shares if share.draft_token_ids]
    masked = [share.request_id for share in step.shares if share.needs_mask]
    stop = f", then stopped: {STOP_WORDS.get(step.admission_stop, step.admission_stop)}" if step.num_tokens else ""
    return [
        FrameField("step_id", _value(step.step_id)),
        FrameField("scheduled_new_reqs", _count(news), [line for share in news for line in _new_lines(share, state)]),
        FrameField("scheduled_cached_reqs", _count(cached, "resumed", len(step.resumed_ids)), [_cached_line(share) for share in cached]),
        FrameField(
            "num_scheduled_tokens",
            _count(step.shares),
            _packed((share.request_id, f"{share.num_tokens}{KIND_LETTERS[share.kind]}", share.kind) for share in step.shares),
        ),
        FrameField("total_num_scheduled_tokens", [*_value(step.num_tokens), Part(f" of {step.token_budget}{stop}", "muted")]),
        FrameField("scheduled_spec_decode_tokens", _count(drafts), [_draft_line(share, step) for share in drafts]),
        FrameField("finished_req_ids", *_names(step.finished_ids, "finished")),
        FrameField("preempted_req_ids", *_names(step.preempted_ids, "preempted")),
        FrameField("structured_output_request_ids", *_names(masked, "chunk")),
        FrameField("new_block_ids_to_zero", *_blocks(step.zeroed_ids)),
        FrameField("blocks allocated", *_blocks(step.allocated_ids)),
        FrameField("blocks freed", *_blocks(step.freed_ids)),
        FrameField("blocks evicted", *_blocks(step.evicted_ids)),
        FrameField("queue_depth", [*_value(step.queue_depth), Part(" steps in flight, this one included", "muted")]),
    ]


def _new_lines(share: Share, state: DashboardState) -> list[Line]:
    row = state.row(share.request_id)
    num_prompt = row.num_prompt_tokens if row is not None else 0
    lines: list[Line] = [
        [_name(share.request_id), Part(" prompt_token_ids ", "muted"), Part(f"{num_prompt} tokens", "value")],
        [
            Part("   num_computed_tokens ", "muted"),
            Part(str(share.start), "value"),
            Part(" (found in the prefix cache)" if share.start else " (nothing cached)", "muted"),
        ],
        [Part("   block_ids ", "muted"), Part(_ids(share.block_ids), "block_used")],
    ]
    if row is not None and row.sampling_params is not None:
        lines.append([Part("   sampling_params ", "muted"), Part(clean(_params(row.sampling_params)))])
    if row is not None and row.prompt:
        lines.append([Part("   prompt ", "muted"), Part(clean(repr(row.prompt)))])
    return lines


def _params(params: SamplingParams) -> str:
    defaults = SamplingParams()
    given = [
        f"{f.name}={getattr(params, f.name)!r}" for f in dataclasses.fields(params) if getattr(params, f.name) != getattr(defaults, f.name)
    ]
    return " ".join(given) or "all as by default"


def _cached_line(share: Share) -> Line:
    line: Line = [
        _name(share.request_id), Part(" num_computed_tokens ", "muted"), Part(str(share.start), "value"),
        Part("  num_output_tokens ", "muted"), Part(str(share.num_output_tokens), "value"), Part("  new_block_ids ", "muted"),
    ]  # fmt: skip
    if share.replaces_table:
        return [*line, Part("REPLACED ", "resumed"), Part(_ids(share.block_ids), "block_used")]
    return [*line, Part(f"+ {_ids(share.new_block_ids)}", "block_used") if share.num_new_blocks else Part("None", "muted")]


def _draft_line(share: Share, step: StepRecord) -> Line:
    line: Line = [_name(share.request_id), Part(f" {len(share.draft_token_ids)} guesses ", "value")]
    known = any(token_id >= 0 for token_id in share.draft_token_ids)
    line.append(Part(_ids(share.draft_token_ids) if known else _HIDDEN, "text" if known else "muted"))
    index = next((i for i, other in enumerate(step.shares) if other.request_id == share.request_id), -1)
    if 0 <= index < len(step.sampled):
        line.append(Part(f"  {max(0, step.sampled[index] - 1)} right", "good"))
    return line


# ---------------------------------------------------------------------------------------------------- the worker
def worker_fields(step: StepRecord, state: DashboardState) -> list[FrameField]:
    """`_update_states`, `_prepare_inputs`, and what comes back."""
    size = state.block_size
    effects_of = worker_half(step, block_size=size or 1, num_prompt_tokens=_prompts(step, state))
    fields = [FrameField("_update_states", _count(effects_of.effects), [_effect_line(effect) for effect in effects_of.effects])]
    if size is None:
        return [*fields, FrameField("slot_mapping", [Part("the block size is not known", "muted")])]
    if step.is_cleanup_only:
        return [*fields, FrameField("forward", [Part("does not run: no token is scheduled", "muted")])]
    return [*fields, *_input_fields(effects_of, size, step.new_ids), *_result_fields(step, effects_of)]


def _prompts(step: StepRecord, state: DashboardState) -> dict[str, int]:
    rows = ((share.request_id, state.row(share.request_id)) for share in step.shares)
    return {request_id: row.num_prompt_tokens for request_id, row in rows if row is not None and row.num_prompt_tokens}


def _effect_line(effect: Effect) -> Line:
    sign, role, words = _EFFECT_WORDS[effect.kind]
    return [Part(fit(sign, 10), role), _name(effect.request_id), Part(f" {words} ", "muted"), Part(_ids(effect.block_ids), "block_used")]


def _input_fields(half: WorkerHalf, size: int, news: tuple[str, ...]) -> list[FrameField]:
    rows = half.rows
    tables = [line for row in rows for line in _table_lines(row, is_new=row.request_id in news)]
    return [
        FrameField("query_start_loc", [Part(_ids(half.query_start_loc), "value")]),
        FrameField(
            "positions", _tokens(half.positions), [[_name(row.request_id), Part(f" {_span(row.positions)}", "value")] for row in rows]
        ),
        FrameField("token gather", _tokens(half.positions), [_source_line(row) for row in rows]),
        FrameField("block table", _count(rows), tables),
        FrameField("slot_mapping", _tokens(half.slot_mapping), [_slots_line(row, size) for row in rows]),
        FrameField("seq_lens", [Part(_ids(half.seq_lens), "value")]),
        FrameField(
            "logits_indices", [Part(_ids(half.logits_indices) or "none: no token is sampled", "value")], [_logits_line(row) for row in rows]
        ),
    ]


def _source_line(row: WorkerRow) -> Line:
    words = {"prompt": "of the prompt", "output": "of the output, where the worker put it", "draft": "guessed"}
    line: Line = [_name(row.request_id)]
    for index, (source, positions) in enumerate(row.sources):
        line += [Part(", " if index else " ", "muted"), Part(_span(positions), "value"), Part(f" {words[source]}", "muted")]
    return line if row.sources else [*line, Part(" from its row of the token table", "muted")]


def _table_lines(row: WorkerRow, *, is_new: bool) -> list[Line]:
    before = "no row" if row.table_before is None else _ids(row.table_before)
    new = row.table_after if row.table_before is None else row.table_after[len(row.table_before) :]
    after: Line = [
        Part(_ids(row.table_after[: len(row.table_after) - len(new)]), "block_used"),
        Part(" " if len(new) < len(row.table_after) else ""),
    ]
    if new:
        after.append(Part(_ids(new), "block_allocated"))
    return [
        [_name(row.request_id), Part(" before ", "muted"), Part(before, "muted" if row.table_before is None else "block_used")],
        [
            Part(" " * NAME_WIDTH),
            Part(" after  ", "muted"),
            *after,
            Part("  REPLACED" if row.replaces_table and not is_new else "", "resumed"),
        ],
    ]


def _slots_line(row: WorkerRow, size: int) -> Line:
    """Runs of slots, with the block that each is in."""
    line: Line = [_name(row.request_id)]
    slots = row.slot_mapping
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1 or slots[index] % size == 0:
            line.append(Part(f" {_span(range(slots[start], slots[index - 1] + 1))}{_GLUE}in{_GLUE}{slots[start] // size}", "value"))
            start = index
    return line


def _logits_line(row: WorkerRow) -> Line:
    if not row.logits_indices:
        return [_name(row.request_id), Part(" none: this chunk does not reach the end" if row.sources else " not known", "muted")]
    rows = f" {_span(row.logits_indices)}"
    return [
        _name(row.request_id),
        Part(rows, "value"),
        Part(f" ({row.num_draft_tokens} guesses are checked)" if row.num_draft_tokens else "", "muted"),
    ]


def _result_fields(step: StepRecord, half: WorkerHalf) -> list[FrameField]:
    lanes = step.lanes
    if step.in_flight:
        return [FrameField("sampled", [Part("in flight", "muted")])]
    lines = _packed(
        (share.request_id, str(count), "good" if count else "muted") for share, count in zip(step.shares, step.sampled, strict=False)
    )
    fields = [FrameField("sampled", [*_value(step.num_new_tokens or 0), Part(" tokens, kept by the worker too", "muted")], lines)]
    if lanes.grammar is not None:
        forward = lanes.execute
        within = forward is not None and lanes.grammar[0] >= forward[0] and lanes.grammar[1] <= forward[1]
        words = f"{seconds(lanes.grammar[1] - lanes.grammar[0])}{', while the forward ran' if within else ''}"
        fields.append(FrameField("grammar masks", [Part(words, "value")]))
    for label, span in (("forward", lanes.execute), ("sampling", lanes.sample)):
        if span is not None:
            fields.append(FrameField(label, [Part(seconds(span[1] - span[0]), "value")]))
    if step.ended_ids:
        fields.append(FrameField("ended with this step", *_names(step.ended_ids, "finished")))
    return fields


# ---------------------------------------------------------------------------------------------------- parts
def _value(value: object) -> Line:
    return [Part(str(value), "value")]


def _count(items: Iterable[object], what: str = "", number: int = 0) -> Line:
    count = sum(1 for _ in items)
    line: Line = [Part(f"{count}", "value" if count else "muted")]
    return [*line, Part(f"   {number} {what}", "resumed")] if number else line


def _tokens(items: list[int]) -> Line:
    return [Part(f"{len(items)}", "value"), Part(" tokens", "muted")]


def _name(request_id: str) -> Part:
    return Part(fit(clean(request_id), NAME_WIDTH), "accent")


def _ids(ids: Iterable[int]) -> str:
    return " ".join(map(str, ids))


def _span(positions: range) -> str:
    return str(positions.start) if len(positions) == 1 else f"{positions.start}-{positions.stop - 1}"


def _names(request_ids: Iterable[str], role: str) -> tuple[Line, list[Line]]:
    names = list(request_ids)
    return _count(names), _packed((name, "", role) for name in names)


def _blocks(block_ids: Iterable[int]) -> tuple[Line, list[Line]]:
    ids = list(block_ids)
    return _count(ids), [[Part(_ids(ids), "block_used")]] if ids else []


def _packed(entries: Iterable[tuple[str, str, str]]) -> list[Line]:
    """(request, text, role) one after the other."""
    line: Line = []
    for request_id, text, role in entries:
        name = clean(request_id).replace(" ", "_")
        line += [Part(f"{name}{_GLUE}", "text"), Part(f"{text}  ", role)] if text else [Part(f"{name}  ", role)]
    return [line] if line else []
