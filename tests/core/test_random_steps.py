"""Many random steps with everything at once: priorities, draft tokens, preemption, failures, aborts, twins, resets.

As the machine of `test_scheduler_machine`, with its strict worker, but drawn by `random`, which is many times quicker, so that
it gets to states that a few hundred steps do not.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from aioengine.core.invariants import check_idle
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import KVLoad, SchedulerOutput
from aioengine.kv_cache_groups import KVCacheGroup, num_blocks_of_request
from aioengine.outputs import ModelRunnerOutput
from aioengine.request import Request, RequestStatus
from aioengine.resolved_config import CacheConfig, SchedulerConfig
from aioengine.sampling_params import RepetitionDetectionParams, SamplingParams

MAX_MODEL_LEN = 40
EOS = 4
STEPS_A_RUN = 400


def next_token(history: list[int]) -> int:
    """The "model": a pure function of the history, so that no schedule may change it; often periodic, so that draft tokens are accepted."""
    return (sum(history[-3:]) * 7 + len(history) // 9) % 5


class Worker:
    """Applies the differences as a worker must, and keeps for each KV slot the token prefix and the group that wrote there."""

    def __init__(self, block_size: int, groups: tuple[KVCacheGroup, ...]) -> None:
        self.block_size, self.groups = block_size, groups
        self.histories: dict[str, list[int]] = {}
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.cache: dict[int, tuple[int, tuple[int, ...]]] = {}

    def run(self, out: SchedulerOutput) -> ModelRunnerOutput:
        for req_id in out.finished_req_ids:
            del self.histories[req_id]
            self.tables.pop(req_id, None)
        for req_id in out.preempted_req_ids:
            del self.tables[req_id]
        cached = out.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in out.scheduled_new_reqs:
            self.histories[new.req_id], self.tables[new.req_id] = list(new.prompt_token_ids), tuple(map(list, new.block_ids))
            starts[new.req_id] = new.num_computed_tokens
        for req_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_req_ids:
                assert req_id not in self.tables
                assert cached.all_token_ids[req_id] == self.histories[req_id]
                self.tables[req_id] = tuple([] for _ in self.groups)
            for table, block_ids in zip(self.tables[req_id], added or (), strict=added is not None):
                table += block_ids
        texts = {req_id: self.histories[req_id] + out.scheduled_spec_decode_tokens.get(req_id, []) for req_id in out.num_scheduled_tokens}
        for req_id, num_tokens in out.num_scheduled_tokens.items():
            for group_id, table in enumerate(self.tables[req_id]):
                for position in range(starts[req_id], starts[req_id] + num_tokens):
                    self.cache[self._slot(table, position)] = (group_id, tuple(texts[req_id][: position + 1]))
        sampled = [self._sample(req_id, text, starts[req_id], out.num_scheduled_tokens[req_id]) for req_id, text in texts.items()]
        return ModelRunnerOutput(list(texts), {req_id: i for i, req_id in enumerate(texts)}, sampled)

    def _slot(self, table: list[int], position: int) -> int:
        block_id = table[position // self.block_size]
        assert block_id > 0, "the null block is used"
        return block_id * self.block_size + position % self.block_size

    def _sample(self, req_id: str, text: list[int], start: int, num_tokens: int) -> list[int]:
        end = start + num_tokens
        for group_id, (group, table) in enumerate(zip(self.groups, self.tables[req_id], strict=True)):
            for position in range(0 if group.sliding_window is None else max(0, start - group.sliding_window + 1), end):
                held = self.cache[self._slot(table, position)]
                assert held == (group_id, tuple(text[: position + 1])), "a slot holds another prefix, or another group's"
        if end < len(text):
            return []
        history = self.histories[req_id]
        num_known = len(history)
        for draft_token_id in [*text[num_known:], None]:
            history.append(next_token(history))
            if history[-1] != draft_token_id:
                break
        return history[num_known:]


class BlockOracle:
    """Which blocks each request must hold, worked out position by position from what the worker was told and gave back."""

    def __init__(self, scheduler: Scheduler, block_size: int, groups: tuple[KVCacheGroup, ...]) -> None:
        self.scheduler, self.block_size, self.groups = scheduler, block_size, groups
        self.next_position: dict[str, int] = {}  # of running requests: the first that later steps may compute
        self.num_positions: dict[str, int] = {}  # that have a slot: all that steps were planned for

    def note_scheduled(self, out: SchedulerOutput) -> None:
        cached = out.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for req_id in out.preempted_req_ids | cached.resumed_req_ids:
            self.num_positions.pop(req_id, None)
        for req_id, num_tokens in out.num_scheduled_tokens.items():
            has_draft_tokens = req_id in out.scheduled_spec_decode_tokens
            self.next_position[req_id] = starts[req_id] + (1 if has_draft_tokens else num_tokens)
            self.num_positions[req_id] = max(self.num_positions.get(req_id, 0), starts[req_id] + num_tokens)

    def note_accepted(self, out: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for req_id in out.scheduled_spec_decode_tokens:
            self.next_position[req_id] += len(result.sampled_token_ids[result.req_id_to_index[req_id]]) - 1

    def check(self) -> None:
        held: list[int] = []
        for request in self.scheduler.requests.values():
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                held += request.block_ids[0]
                continue
            if request.status != RequestStatus.RUNNING:
                assert not any(request.block_ids), "who waits holds nothing"
                continue
            tables = request.block_ids
            for group, table in zip(self.groups, tables, strict=True):
                window = group.sliding_window or MAX_MODEL_LEN
                seen = self.next_position[request.request_id] - window + 1
                num_slots = -(-self.num_positions[request.request_id] // self.block_size) * self.block_size
                indices = {position // self.block_size for position in range(num_slots) if position >= seen}
                assert {index for index, block_id in enumerate(table) if block_id} == indices, (request, group, table)
                held += filter(None, table)
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.num_total_blocks - pool.num_free_blocks == len(set(held)), "what nobody holds is free"


def draw_groups(rng: random.Random) -> tuple[KVCacheGroup, ...]:
    """Often one that sees everything, else one with a window, or 2 to 6 of a few kinds."""
    if rng.random() < 0.4:
        return (KVCacheGroup((0,)),)
    if rng.random() < 0.2:
        return (KVCacheGroup((0,), rng.randint(1, 20)),)
    kinds = [rng.choice((None, rng.randint(1, 20))) for _ in range(3)]
    windows = sorted((rng.choice(kinds) for _ in range(rng.randint(2, 6))), key=lambda window: window or 0)
    return tuple(KVCacheGroup((layer,), window) for layer, window in enumerate(windows))


class Connector:
    """Has what it is said to have, takes its time, and sometimes lacks some of it; sees whether what leaves is what it is called."""

    def __init__(self, scheduler: Scheduler, worker: Worker, rng: random.Random) -> None:
        self.scheduler, self.worker, self.rng = scheduler, worker, rng
        self.begun: list[tuple[KVLoad, Request]] = []

    def before_step(self, out: SchedulerOutput) -> None:
        hashes = self.scheduler.take_leaving_hashes()
        if out.kv_connector_metadata is None:
            assert not hashes
            return
        for block_id, block_hash in zip(out.kv_connector_metadata.saves, hashes, strict=True):
            self._check_content(block_id, block_hash)
        self.begun += [(load, self.scheduler.loading[load.req_id]) for load in out.kv_connector_metadata.loads]

    def _check_content(self, block_id: int, block_hash: bytes) -> None:
        size = self.worker.block_size
        _, prefix = self.worker.cache[block_id * size + size - 1]
        for salt in (None, "s"):
            hashes: list[bytes] = []
            self.scheduler.kv_cache_manager.extend_hashes(hashes, prefix, len(prefix) // size, cache_salt=salt)
            if hashes[-1] == block_hash:
                return
        raise AssertionError(f"block {block_id} leaves under a name that is not its content's")

    def finish_one(self) -> None:
        load, request = self.begun.pop(self.rng.randrange(len(self.begun)))
        if self.scheduler.loading.get(load.req_id) is not request:
            return  # it ended or was reset
        num_blocks, size = self.rng.randint(0, len(load.block_ids)), self.worker.block_size
        for index, block_id in enumerate(load.block_ids[:num_blocks], len(load.computed_block_ids)):
            for offset in range(size):
                self.worker.cache[block_id * size + offset] = (0, tuple(request.all_token_ids[: index * size + offset + 1]))
        self.scheduler.finish_load(load.req_id, num_blocks)


class Run:
    """A scheduler of random shape, and the calls that an engine could make."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        block_size = rng.choice((1, 2, 4))
        max_num_seqs = rng.randint(1, 6)
        num_speculative_tokens = rng.choice((0, 0, 1, 4))
        self.depth = 1 if num_speculative_tokens else rng.randint(1, 3)
        groups = draw_groups(rng)
        max_num_batched_tokens = max_num_seqs + rng.randint(0, 30)
        self.has_connector = len(groups) == 1 and groups[0].sliding_window is None and rng.random() < 0.6
        num_blocks = num_blocks_of_request(groups, MAX_MODEL_LEN, block_size=block_size, max_step_tokens=max_num_batched_tokens)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=MAX_MODEL_LEN,
                long_prefill_token_threshold=rng.choice((0, 0, 3, 7)),
                policy=rng.choice(("fcfs", "priority")),
                num_speculative_tokens=num_speculative_tokens,
                prompt_lookup_min=1,
                prompt_lookup_max=3,
            ),
            cache=CacheConfig(
                block_size=block_size,
                enable_prefix_caching=rng.random() < 0.9,
                zero_new_blocks=rng.random() < 0.3,
                kv_cache_groups=groups,
                has_kv_connector=self.has_connector,
            ),
            num_kv_cache_blocks=1 + num_blocks + rng.choice((0, 1, 5, 20)) * len(groups),
            eos_token_ids=frozenset({EOS}),
            check_invariants=True,
        )
        self.worker = Worker(block_size, groups)
        self.connector = Connector(self.scheduler, self.worker, rng)
        self.oracle = BlockOracle(self.scheduler, block_size, groups)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.live: dict[str, Request] = {}
        self.num_added = 0

    def add(self) -> None:
        rng = self.rng
        prompt = [0, 1, 2, 3] * rng.randint(0, 5) + [rng.randint(0, 3) for _ in range(rng.randint(1, 8))]
        params: dict[str, Any] = {"max_tokens": rng.randint(1, 14), "ignore_eos": rng.random() < 0.5}
        if rng.random() < 0.3:
            params["repetition_detection"] = RepetitionDetectionParams(rng.randint(1, 4), 1, rng.randint(2, 4))
        if rng.random() < 0.1:
            params["prompt_logprobs"] = 0
        salt = rng.choice((None, None, None, "s"))
        request = Request(
            f"r{self.num_added}",
            prompt,
            sampling_params=SamplingParams(**params),
            priority=rng.randint(0, 2),
            cache_salt=salt,
            num_external_blocks=rng.randint(0, 9) if self.has_connector else 0,
        )
        self.num_added += 1
        self.scheduler.add_request(request)
        self.live[request.request_id] = request

    def step(self) -> int:
        """One call of the scheduler, and now and then one of the others; returns how many steps were scheduled."""
        rng = self.rng
        if len(self.live) < 12 and rng.random() < 0.25:
            self.add()
        if self.live and rng.random() < 0.03:
            (request,) = self.scheduler.finish_requests([rng.choice(list(self.live))], RequestStatus.FINISHED_ABORTED)
            del self.live[request.request_id]
        if rng.random() < 0.02:
            done = self.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
            assert not done or self.scheduler.make_stats().num_cached_blocks == 0
        num_steps = 0
        if len(self.in_flight) < self.depth and (out := self.scheduler.schedule()) is not None:
            self.run_step(out)
            num_steps = 1
        if self.connector.begun and rng.random() < 0.3:
            self.connector.finish_one()
        self.oracle.check()
        if self.in_flight and (len(self.in_flight) == self.depth or rng.random() < 0.5):
            self.update()
        return num_steps

    def run_step(self, out: SchedulerOutput) -> None:
        self.connector.before_step(out)
        self.in_flight.append((out, self.worker.run(out)))
        self.oracle.note_scheduled(out)

    def update(self) -> None:
        out, result = self.in_flight.popleft()
        if result.req_ids and self.rng.random() < 0.02:
            result = replace(result, failed_req_ids={self.rng.choice(result.req_ids): "NaN"})
        self.oracle.note_accepted(out, result)
        for output in self.scheduler.update_from_output(out, result):
            if output.finish_reason is not None:
                request = self.live.pop(output.request_id)
                if output.finish_reason != "error":
                    self.check_ended(request)
        self.check_stats()
        self.oracle.check()

    def check_ended(self, request: Request) -> None:
        """It is what the model gives to this prompt alone."""
        history = request.prompt_token_ids
        while len(history) < request.num_tokens:
            history.append(next_token(history))
        assert request.all_token_ids == history

    def check_stats(self) -> None:
        stats = self.scheduler.make_stats()
        assert stats.prefix_cache_hits <= stats.prefix_cache_queries
        assert stats.num_resumed_reqs <= stats.num_preemptions
        assert stats.num_accepted_tokens <= stats.num_draft_tokens

    def finish(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_work and not self.in_flight:
                break
            if len(self.in_flight) < self.depth and (out := self.scheduler.schedule()) is not None:
                self.run_step(out)
            while self.connector.begun:
                self.connector.finish_one()
            if self.in_flight:
                self.update()
        assert not self.live
        check_idle(self.scheduler)
        assert not self.worker.histories
        assert not self.worker.tables


def run_steps(num_steps: int, *, first_seed: int) -> None:
    taken, seed = 0, first_seed
    total = {"preempted": 0, "accepted": 0, "hits": 0, "loaded": 0}
    while taken < num_steps:
        run = Run(seed)
        target = taken + STEPS_A_RUN
        try:
            while taken < target:
                taken += run.step()
                if not run.live:
                    run.add()
            run.finish()
        except Exception as exc:
            raise AssertionError(f"with seed {seed}, after {taken - target + STEPS_A_RUN} steps") from exc
        stats = run.scheduler.make_stats()
        total["preempted"] += stats.num_preemptions
        total["accepted"] += stats.num_accepted_tokens
        total["hits"] += stats.prefix_cache_hits
        total["loaded"] += stats.external_prefix_cache_hits
        seed += 1
    assert min(total.values()) > num_steps // 100, total


def test_some_thousand_random_steps_keep_the_books_and_change_no_token() -> None:
    run_steps(4000, first_seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_240_000_random_steps_keep_the_books_and_change_no_token() -> None:
    run_steps(240_000, first_seed=1000)
