"""What the worker makes of a step: its tables before and after, and the arrays of the model's input.

Derived from what the step told it and nothing else, as the worker itself does: `_update_states`, then `_prepare_inputs`. The
tests compare it with the arrays of a real worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from aioengine_tui.model.rows import Share, StepRecord

EffectKind = Literal["forget", "preempt", "add", "resume", "append", "unchanged"]
"""What `_update_states` does to a request: forget: its row is free again. preempt: its row is free, its parameters are kept.
add: a row, filled with the prompt and the block table. resume: a row again, filled with prompt and output, and another table.
append: blocks at the end of its table. unchanged: the table stays."""

TokenSource = Literal["prompt", "output", "draft"]
"""Where a token that goes into the model stands in the worker's token table: in the prompt, in the output (put there by the
worker itself, when it was sampled), or behind both, as a guess."""


@dataclass(frozen=True, slots=True)
class Effect:
    """One request in `_update_states`."""

    kind: EffectKind
    request_id: str
    block_ids: tuple[int, ...] = ()  # that it was sent


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One request in the model's input; its tokens are first_token .. first_token + num_tokens - 1 of the step."""

    request_id: str
    first_token: int  # its entry of query_start_loc
    num_tokens: int
    positions: range
    table_before: tuple[int, ...] | None  # None: the worker had no row of it
    table_after: tuple[int, ...]
    replaces_table: bool
    slot_mapping: tuple[int, ...]  # a slot for each token: block id * block size + offset
    sources: tuple[tuple[TokenSource, range], ...]  # positions by where their tokens come from, in order; empty: not known
    logits_indices: range  # the tokens of the step after which one is sampled; empty: a chunk that does not reach the end

    @property
    def seq_len(self) -> int:
        """Tokens that attention looks at: computed ones and those of this step."""
        return self.positions.stop

    @property
    def num_draft_tokens(self) -> int:
        return max(0, len(self.logits_indices) - 1)


@dataclass(frozen=True, slots=True)
class WorkerHalf:
    """The worker's side of a step. rows: in the order of the batch."""

    effects: tuple[Effect, ...]  # in the order in which the worker goes through them
    rows: tuple[WorkerRow, ...]

    @property
    def query_start_loc(self) -> list[int]:
        """[num_reqs + 1]"""
        return [0, *(row.first_token + row.num_tokens for row in self.rows)]

    @property
    def seq_lens(self) -> list[int]:
        """[num_reqs]"""
        return [row.seq_len for row in self.rows]

    @property
    def positions(self) -> list[int]:
        """[num_tokens]"""
        return [position for row in self.rows for position in row.positions]

    @property
    def slot_mapping(self) -> list[int]:
        """[num_tokens]"""
        return [slot for row in self.rows for slot in row.slot_mapping]

    @property
    def logits_indices(self) -> list[int]:
        """[num_rows]"""
        return [index for row in self.rows for index in row.logits_indices]


def worker_half(step: StepRecord, *, block_size: int, num_prompt_tokens: Mapping[str, int]) -> WorkerHalf:
    """What the worker does with a step.

    num_prompt_tokens: by request id, as far as known. Of a request that is missing there, neither the sources of its tokens
    nor whether it samples is told.
    """
    rows: list[WorkerRow] = []
    first_token = 0
    for share in step.shares:
        rows.append(_row(share, first_token, block_size, num_prompt_tokens.get(share.request_id), is_new=share.request_id in step.new_ids))
        first_token += share.num_tokens
    return WorkerHalf(tuple(_effects(step)), tuple(rows))


def _effects(step: StepRecord) -> list[Effect]:
    """Who is gone comes first, because the rows they free may be needed by those who come."""
    effects = [Effect("forget", request_id) for request_id in sorted(step.finished_ids)]
    effects += [Effect("preempt", request_id) for request_id in sorted(step.preempted_ids)]
    shares = {share.request_id: share for share in step.shares}
    effects += [Effect("add", request_id, shares[request_id].block_ids) for request_id in step.new_ids if request_id in shares]
    for share in step.shares:
        if share.request_id not in step.new_ids:
            kind: EffectKind = "resume" if share.replaces_table else "append" if share.num_new_blocks else "unchanged"
            effects.append(Effect(kind, share.request_id, share.new_block_ids))
    return effects


def _row(share: Share, first_token: int, block_size: int, num_prompt: int | None, *, is_new: bool) -> WorkerRow:
    positions = range(share.start, share.end)
    table = share.block_ids
    num_known = None if num_prompt is None else num_prompt + (0 if is_new else share.num_output_tokens)
    num_drafts = len(share.draft_token_ids)
    samples = num_known is not None and share.end == num_known + num_drafts
    last = first_token + share.num_tokens
    return WorkerRow(
        request_id=share.request_id,
        first_token=first_token,
        num_tokens=share.num_tokens,
        positions=positions,
        table_before=None if share.replaces_table else share.blocks_before,
        table_after=table,
        replaces_table=share.replaces_table,
        slot_mapping=tuple(table[p // block_size] * block_size + p % block_size for p in positions if p // block_size < len(table)),
        sources=() if num_prompt is None or num_known is None else _sources(positions, num_prompt, num_known),
        logits_indices=range(last - 1 - num_drafts, last) if samples else range(0),
    )


def _sources(positions: range, num_prompt: int, num_known: int) -> tuple[tuple[TokenSource, range], ...]:
    parts: tuple[tuple[TokenSource, range], ...] = (
        ("prompt", range(positions.start, min(positions.stop, num_prompt))),
        ("output", range(max(positions.start, num_prompt), min(positions.stop, num_known))),
        ("draft", range(max(positions.start, num_known), positions.stop)),
    )
    return tuple((source, part) for source, part in parts if part)
