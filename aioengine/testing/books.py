"""What a worker has to know of the requests, kept strictly: a step that contradicts it fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aioengine.core.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from aioengine.kv_cache_groups import KVCacheGroup
from aioengine.outputs import Logprob, TokenLogprobs
from aioengine.sampling_params import SamplingParams
from aioengine.worker.sample.row import check_edit_widths, check_token_ids, params_row


class ContractError(AssertionError):
    """A SchedulerOutput contradicts what the worker was told before."""


@dataclass(slots=True)
class WorkerRequest:
    sampling_params: SamplingParams
    num_prompt_tokens: int
    token_ids: list[int]  # prompt and sampled ones, the latest included
    digests: list[int]  # one a token: depends on it and all before it; what the KV of that position would
    tables: list[list[int]]  # block ids, a list for each KV-cache group
    num_computed_tokens: int = 0
    has_slot: bool = True
    num_prompt_logprobs: int = 1  # prompt tokens whose logprobs were reported; nothing comes before the first

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.digests.append(hash((self.digests[-1] if self.digests else 0, token_id)))

    def digests_with(self, draft_token_ids: Sequence[int]) -> list[int]:
        """The digests of the tokens, and of draft tokens behind them."""
        digests = self.digests.copy() if draft_token_ids else self.digests
        for token_id in draft_token_ids:
            digests.append(hash((digests[-1], token_id)))
        return digests


class WorkerBooks:
    """The worker's requests, slots and paged cache, in which a digest of the prefix stands for keys and values."""

    def __init__(self, *, num_blocks: int, block_size: int, max_num_seqs: int | None, groups: Sequence[KVCacheGroup]) -> None:
        self.requests: dict[str, WorkerRequest] = {}
        self.failed: dict[str, str] = {}  # requests that do not fit a worker's tables, and why
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.groups = groups
        self._kv_cache: list[list[tuple[int, int] | None]] = []  # [num_blocks][block_size]: the group that wrote there, and the digest
        self._last_step_id = 0

    @property
    def num_used_slots(self) -> int:
        return sum(request.has_slot for request in self.requests.values())

    def initialize_kv_cache(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._kv_cache = [[None] * self.block_size for _ in range(num_blocks)]

    def apply(self, output: SchedulerOutput) -> None:
        """Take in who came, went and moved. Raises ContractError."""
        expect(output.step_id == self._last_step_id + 1, f"step {output.step_id} after step {self._last_step_id}")
        self._last_step_id = output.step_id
        for req_id in sorted(output.finished_req_ids):
            self.requests.pop(req_id, None)
        for req_id in sorted(output.preempted_req_ids):
            request = self.requests.get(req_id)
            expect(request is not None and request.has_slot, f"{req_id!r} is preempted without a slot")
            assert request is not None
            request.has_slot, request.tables, request.num_computed_tokens = False, [], 0
        for block_id in output.new_block_ids_to_zero:
            self._kv_cache[block_id] = [None] * self.block_size
        self.failed = {req_id: cause for req_id, cause in self.failed.items() if req_id in self.requests}
        for new in output.scheduled_new_reqs:
            self._add(new)
        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            expect(req_id in self.requests, f"{req_id!r} is unknown here but comes as a difference")
            self._update(req_id, self.requests[req_id], cached, index)
        used, limit = self.num_used_slots, self.max_num_seqs
        expect(limit is None or used <= limit, f"{used} requests have slots, there are {limit}")
        scheduled = {new.req_id for new in output.scheduled_new_reqs} | set(cached.req_ids)
        expect(scheduled == output.num_scheduled_tokens.keys(), "the new and the cached requests are not the scheduled ones")
        expect(sum(output.num_scheduled_tokens.values()) == output.total_num_scheduled_tokens, "the total is not the sum")

    def _add(self, new: NewRequestData) -> None:
        expect(new.req_id not in self.requests, f"{new.req_id!r} is new but was here before")
        request = WorkerRequest(new.sampling_params, len(new.prompt_token_ids), [], [], _copied(new.block_ids), new.num_computed_tokens)
        for token_id in new.prompt_token_ids:
            request.append(token_id)
        self.requests[new.req_id] = request
        try:
            params_row(new.sampling_params)
            check_edit_widths(new.sampling_params)
            check_token_ids(new.prompt_token_ids)
        except Exception as exc:  # as the worker: whatever it is, it is about this request
            self.failed[new.req_id] = f"the request cannot be run: {type(exc).__name__}: {exc}"

    def _update(self, req_id: str, request: WorkerRequest, cached: CachedRequestData, index: int) -> None:
        new_block_ids, start = cached.new_block_ids[index], cached.num_computed_tokens[index]
        if req_id in cached.resumed_req_ids:
            expect(not request.has_slot, f"{req_id!r} is resumed but was not preempted")
            expect(req_id in cached.all_token_ids, f"{req_id!r} is resumed without its history")
            assert new_block_ids is not None
            request.has_slot, request.tables, request.num_computed_tokens = True, _copied(new_block_ids), start
        else:
            expect(request.has_slot, f"{req_id!r} is scheduled without having been resumed")
            expect(start == request.num_computed_tokens, f"{req_id!r} starts at {start}, the worker is at {request.num_computed_tokens}")
            for table, added in zip(request.tables, new_block_ids or (), strict=new_block_ids is not None):
                table += added
        history = cached.all_token_ids.get(req_id, request.token_ids)
        expect(history == request.token_ids, f"the history of {req_id!r} is {history}, the worker's {request.token_ids}")
        num_output = len(request.token_ids) - request.num_prompt_tokens
        expect(
            cached.num_output_tokens[index] == num_output, f"{req_id!r}: {cached.num_output_tokens[index]} output tokens, not {num_output}"
        )

    def forward(self, output: SchedulerOutput) -> set[str]:
        """Write the digests of the scheduled positions, then read those of all positions; returns who samples."""
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[req_id]
            start = request.num_computed_tokens
            end = start + num_tokens
            expect(num_tokens > 0, f"{req_id!r} is scheduled with {num_tokens} tokens")
            digests = request.digests_with(output.scheduled_spec_decode_tokens.get(req_id, ()))
            expect(end <= len(digests), f"{req_id!r} is scheduled up to {end} and has {len(digests)} tokens")
            expect(len(request.tables) == len(self.groups), f"{req_id!r} has {len(request.tables)} tables for {len(self.groups)} groups")
            for group_id, group in enumerate(self.groups):
                table = request.tables[group_id]
                self._check_table(req_id, table, first_block=_first_in_sight(group, start) // self.block_size, end=end)
                for position in range(start, end):
                    self._kv_cache[table[position // self.block_size]][position % self.block_size] = (group_id, digests[position])
            request.num_computed_tokens = end
        samples = set()
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[req_id]
            digests = request.digests_with(output.scheduled_spec_decode_tokens.get(req_id, ()))
            start = request.num_computed_tokens - num_tokens
            for group_id, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
                for position in range(_first_in_sight(group, start), request.num_computed_tokens):
                    block_id = table[position // self.block_size]
                    held = self._kv_cache[block_id][position % self.block_size]
                    expect(held == (group_id, digests[position]), f"block {block_id} does not hold position {position} of {req_id!r}")
            if request.num_computed_tokens == len(digests):
                samples.add(req_id)
        return samples

    def _check_table(self, req_id: str, table: list[int], *, first_block: int, end: int) -> None:
        """All blocks that a step reads or writes are there; what lies behind a window is neither read nor written."""
        expect(end <= len(table) * self.block_size, f"{req_id!r} needs {end} slots and has {len(table)} blocks")
        in_use = table[first_block:]
        expect(len(set(in_use)) == len(in_use), f"{req_id!r} has a block twice: {table}")
        expect(all(0 < b < self.num_blocks for b in in_use), f"{req_id!r} has a block that cannot be: {table}")

    def take_prompt_logprobs(self, output: SchedulerOutput, *, vocab_size: int) -> dict[str, list[TokenLogprobs]]:
        """Of the prompt tokens whose logits this step has computed, if they were not reported before."""
        taken = {}
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[req_id]
            start, end = request.num_prompt_logprobs, min(request.num_computed_tokens + 1, request.num_prompt_tokens)
            wanted = request.sampling_params.prompt_logprobs
            if wanted is None or start >= end:
                continue
            expect(request.num_computed_tokens - num_tokens < start, f"{req_id!r} skips prompt positions whose logprobs it wants")
            taken[req_id] = [make_logprobs(t, wanted, vocab_size=vocab_size) for t in request.token_ids[start:end]]
            request.num_prompt_logprobs = end
        return taken


def _copied(tables: Sequence[list[int]]) -> list[list[int]]:
    return [table.copy() for table in tables]


def _first_in_sight(group: KVCacheGroup, start: int) -> int:
    """The first position that a step from `start` on reads."""
    return 0 if group.sliding_window is None else max(0, start - group.sliding_window + 1)


def make_logprobs(token_id: int, num_logprobs: int, *, vocab_size: int) -> TokenLogprobs:
    """The token, and others after it as the next likely ones."""
    others = [(token_id + 1 + offset) % vocab_size for offset in range(max(0, num_logprobs - 1))]
    return {token: Logprob(-0.5 - rank, rank + 1) for rank, token in enumerate([token_id, *others])}


def expect(condition: bool, message: str) -> None:
    """Raise ContractError(message) unless the condition holds."""
    if not condition:
        raise ContractError(message)
