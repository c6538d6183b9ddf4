"""Hypothesis drives the scheduler against a strict worker that checks every KV slot it reads."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import ClassVar

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioengine.core.block_hash import in_group
from aioengine.core.invariants import check_idle, check_scheduler
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.errors import InvalidRequestError
from aioengine.kv_cache_groups import KVCacheGroup, group_layers
from aioengine.outputs import ModelRunnerOutput
from aioengine.request import Request, RequestStatus
from aioengine.resolved_config import CacheConfig, SchedulerConfig
from aioengine.sampling_params import SamplingParams

VOCAB_SIZE = 5  # small, so that prompts share prefixes and stop tokens turn up
EOS = 4


def next_token(history: list[int]) -> int:
    """The "model": a pure function of the history, so that no schedule may change it."""
    return (sum(history) * 7 + len(history) * 3 + history[-1]) % VOCAB_SIZE


@dataclass
class Row:
    history: list[int]
    tables: list[list[int]]  # one for each KV-cache group


@dataclass
class StrictWorker:
    """Applies the differences as a worker must, and models the KV cache: slot -> the token prefix and the group that wrote there."""

    block_size: int
    max_num_seqs: int
    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup((0,)),)
    rows: dict[str, Row] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    cache: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    def run(self, out: SchedulerOutput) -> ModelRunnerOutput:
        for req_id in out.finished_req_ids:
            self.known.remove(req_id)
            self.rows.pop(req_id, None)
        for req_id in out.preempted_req_ids:
            del self.rows[req_id]
        starts = self._apply_new(out) | self._apply_cached(out)
        draft_token_ids = out.scheduled_spec_decode_tokens
        assert len(self.rows) <= self.max_num_seqs
        for block_id in out.new_block_ids_to_zero:
            for slot in range(block_id * self.block_size, (block_id + 1) * self.block_size):
                self.cache.pop(slot, None)
        for req_id, num_tokens in out.num_scheduled_tokens.items():  # every layer writes all keys before it reads any
            self._write(self.rows[req_id], starts[req_id], num_tokens, draft_token_ids=draft_token_ids.get(req_id, []))
        sampled = [
            self._read_and_sample(self.rows[req_id], starts[req_id], n, draft_token_ids=draft_token_ids.get(req_id, []))
            for req_id, n in out.num_scheduled_tokens.items()
        ]
        req_ids = list(out.num_scheduled_tokens)
        return ModelRunnerOutput(req_ids, {req_id: i for i, req_id in enumerate(req_ids)}, sampled)

    def _apply_new(self, out: SchedulerOutput) -> dict[str, int]:
        for new in out.scheduled_new_reqs:
            assert new.req_id not in self.known
            self.known.add(new.req_id)
            self.rows[new.req_id] = Row(new.prompt_token_ids.copy(), [table.copy() for table in new.block_ids])
        return {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}

    def _apply_cached(self, out: SchedulerOutput) -> dict[str, int]:
        cached = out.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            assert req_id in self.known
            block_ids = cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:
                assert req_id not in self.rows
                assert block_ids is not None
                self.rows[req_id] = Row(cached.all_token_ids[req_id].copy(), [table.copy() for table in block_ids])
            elif block_ids is not None:
                for table, added in zip(self.rows[req_id].tables, block_ids, strict=True):
                    assert added
                    table += added
        return dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

    def _slot(self, table: list[int], position: int) -> int:
        slot = table[position // self.block_size] * self.block_size + position % self.block_size
        assert slot >= self.block_size, "the null block is used"
        return slot

    def _write(self, row: Row, start: int, num_tokens: int, *, draft_token_ids: list[int]) -> None:
        tokens = row.history + draft_token_ids
        assert start + num_tokens <= len(tokens), "a token that is neither known nor drafted is computed"
        assert not draft_token_ids or start + num_tokens == len(tokens), "draft tokens are left out"
        for group_id, table in enumerate(row.tables):
            for position in range(start, start + num_tokens):
                self.cache[self._slot(table, position)] = (group_id, tuple(tokens[: position + 1]))

    def _read_and_sample(self, row: Row, start: int, num_tokens: int, *, draft_token_ids: list[int]) -> list[int]:
        tokens, end = row.history + draft_token_ids, start + num_tokens
        for group_id, (group, table) in enumerate(zip(self.groups, row.tables, strict=True)):
            first = 0 if group.sliding_window is None else max(0, start - group.sliding_window + 1)
            for position in range(first, end):
                expected = (group_id, tuple(tokens[: position + 1]))
                assert self.cache.get(self._slot(table, position)) == expected, "a slot holds another prefix, or another group's"
        if end < len(tokens):
            return []
        num_known = len(row.history)
        for draft_token_id in [*draft_token_ids, None]:
            row.history.append(next_token(row.history))
            if row.history[-1] != draft_token_id:
                break
        return row.history[num_known:]


class SchedulerMachine(RuleBasedStateMachine):
    scheduler_type: ClassVar[type[Scheduler]] = Scheduler

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.live: dict[str, Request] = {}
        self.num_added = 0

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 20),
        threshold=st.sampled_from([0, 0, 3]),
        policy=st.sampled_from(["fcfs", "priority", "sjf"]),
        caching=st.booleans(),
        zeroing=st.booleans(),
        depth=st.integers(1, 3),
        chunked=st.booleans(),
        num_speculative_tokens=st.sampled_from([0, 1, 3, 8]),
        min_n=st.integers(1, 2),
        windows=st.sampled_from([(None,), (None,), (1,), (5,), (None, 3), (6, None, 6), (None, 2, 2, 7, None, 2), (4, 9)]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        threshold: int,
        policy: str,
        caching: bool,
        zeroing: bool,
        depth: int,
        chunked: bool,
        num_speculative_tokens: int,
        min_n: int,
        windows: tuple[int | None, ...],
    ) -> None:
        self.depth = depth
        max_model_len = 24
        self.scheduler = self.scheduler_type(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_seqs + extra_budget if chunked else max_model_len + extra_budget,
                max_model_len=max_model_len,
                enable_chunked_prefill=chunked,
                long_prefill_token_threshold=threshold if chunked else 0,
                policy=policy,  # type: ignore[arg-type]
                num_speculative_tokens=num_speculative_tokens,
                prompt_lookup_min=min_n,
                prompt_lookup_max=3,
            ),
            cache=CacheConfig(
                block_size=block_size, enable_prefix_caching=caching, zero_new_blocks=zeroing, kv_cache_groups=group_layers(windows)
            ),
            num_kv_cache_blocks=1 + (num_blocks - 1) * (1 + len(group_layers(windows))) // 2,  # windows need less
            eos_token_ids=frozenset({EOS}),
            check_invariants=True,
        )
        self.worker = StrictWorker(block_size, max_num_seqs, groups=group_layers(windows))

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "s"]),
    )
    def add(self, prompt: list[int], max_tokens: int, min_tokens: int, ignore_eos: bool, priority: int, salt: str | None) -> None:
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), ignore_eos=ignore_eos)
        request = Request(f"r{self.num_added}", prompt, sampling_params=params, priority=priority, cache_salt=salt)
        self.num_added += 1
        kv = self.scheduler.kv_cache_manager
        num_blocks = kv.num_blocks_for(min(len(prompt) + max_tokens, 24) - 1)
        fits = len(prompt) < 24 and num_blocks <= kv.block_pool.num_total_blocks
        try:
            self.scheduler.add_request(request)
        except InvalidRequestError:
            assert not fits
        else:
            assert fits
            self.live[request.request_id] = request

    @precondition(lambda self: self.live)
    @rule(data=st.data(), status=st.sampled_from([RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED]))
    def finish(self, data: st.DataObject, status: RequestStatus) -> None:
        req_id = data.draw(st.sampled_from(sorted(self.live)))
        ended = self.scheduler.finish_requests([req_id, "unknown"], status)
        assert ended == [self.live.pop(req_id)]

    @precondition(lambda self: len(self.in_flight) < self.depth)
    @rule()
    def schedule(self) -> None:
        out = self.scheduler.schedule()
        if out is not None:
            self.in_flight.append((out, self.worker.run(out)))

    @precondition(lambda self: self.in_flight)
    @rule()
    def update(self) -> None:
        self._update()

    @precondition(lambda self: self.in_flight and self.in_flight[0][1].req_ids)
    @rule(data=st.data())
    def update_with_a_failure(self, data: st.DataObject) -> None:
        self._update(fails=data.draw(st.sampled_from(self.in_flight[0][1].req_ids)))

    def _update(self, *, fails: str | None = None) -> None:
        out, output = self.in_flight.popleft()
        if fails is not None:
            output = replace(output, failed_req_ids={fails: "NaN"})
        for result in self.scheduler.update_from_output(out, output):
            request = self.live[result.request_id]
            if result.request_id == fails:
                assert (result.new_token_ids, result.finish_reason, result.error) == ([], "error", "NaN")
                find = self.scheduler.kv_cache_manager.block_pool.find
                names = [in_group(name, group_id) for name in request.block_hashes for group_id in range(len(self.worker.groups))]
                assert not any(map(find, names)), "what a failed request computed is served"
                del self.live[fails]
                continue
            assert result.new_token_ids == request.output_token_ids[-len(result.new_token_ids) :]
            if result.finish_reason is not None:
                self._check_ended(self.live.pop(result.request_id))

    def _check_ended(self, request: Request) -> None:
        """The output is what the model gives to this prompt alone, up to the first stop."""
        params, history = request.sampling_params, request.prompt_token_ids
        while True:
            history.append(next_token(history))
            num_output_tokens = len(history) - request.num_prompt_tokens
            stopped = history[-1] == EOS and not params.ignore_eos and num_output_tokens >= params.min_tokens
            if stopped or num_output_tokens == params.max_tokens or len(history) == 24:
                break
        assert request.all_token_ids == history
        assert request.finish_reason == ("stop" if stopped else "length")

    @rule(num_steps=st.integers(1, 30))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if len(self.in_flight) < self.depth:
                self.schedule()
            if self.in_flight and len(self.in_flight) >= self.depth:
                self.update()

    @rule(reset_running_requests=st.booleans())
    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        is_reset = self.scheduler.reset_prefix_cache(reset_running_requests)
        assert is_reset or not reset_running_requests

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "scheduler"):
            check_scheduler(self.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        num_steps = 0
        while self.scheduler.has_work or self.in_flight:
            self.schedule()
            assert self.in_flight, "there is work but nothing can be scheduled and nothing is in flight"
            self.update()
            num_steps += 1
            assert num_steps < 5000, "no progress"
        assert not self.live
        check_idle(self.scheduler)
        assert not self.worker.rows
        assert not self.worker.known


TestSchedulerMachine = SchedulerMachine.TestCase
# 200 runs of up to 50 rules, some of which are 30 steps: well over 10,000 steps.
TestSchedulerMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
