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

from aioengine.config import CacheConfig, SchedulerConfig
from aioengine.core.invariants import check_idle
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.outputs import ModelRunnerOutput
from aioengine.request import Request, RequestStatus
from aioengine.sampling_params import RepetitionDetectionParams, SamplingParams

MAX_MODEL_LEN = 40
EOS = 4
STEPS_A_RUN = 400


def next_token(history: list[int]) -> int:
    """The "model": a pure function of the history, so that no schedule may change it; often periodic, so that draft tokens are accepted."""
    return (sum(history[-3:]) * 7 + len(history) // 9) % 5


class Worker:
    """Applies the differences as a worker must, and keeps for each KV slot the token prefix that was computed there."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.histories: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.cache: dict[int, tuple[int, ...]] = {}

    def run(self, out: SchedulerOutput) -> ModelRunnerOutput:
        for req_id in out.finished_req_ids:
            del self.histories[req_id]
            self.tables.pop(req_id, None)
        for req_id in out.preempted_req_ids:
            del self.tables[req_id]
        cached = out.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in out.scheduled_new_reqs:
            self.histories[new.req_id], self.tables[new.req_id] = list(new.prompt_token_ids), list(new.block_ids[0])
            starts[new.req_id] = new.num_computed_tokens
        for req_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_req_ids:
                assert req_id not in self.tables
                assert cached.all_token_ids[req_id] == self.histories[req_id]
                self.tables[req_id] = []
            self.tables[req_id] += [] if added is None else added[0]
        texts = {req_id: self.histories[req_id] + out.scheduled_spec_decode_tokens.get(req_id, []) for req_id in out.num_scheduled_tokens}
        for req_id, num_tokens in out.num_scheduled_tokens.items():
            for position in range(starts[req_id], starts[req_id] + num_tokens):
                self.cache[self._slot(req_id, position)] = tuple(texts[req_id][: position + 1])
        sampled = [self._sample(req_id, text, starts[req_id] + out.num_scheduled_tokens[req_id]) for req_id, text in texts.items()]
        return ModelRunnerOutput(list(texts), {req_id: i for i, req_id in enumerate(texts)}, sampled)

    def _slot(self, req_id: str, position: int) -> int:
        block_id = self.tables[req_id][position // self.block_size]
        assert block_id > 0, "the null block is used"
        return block_id * self.block_size + position % self.block_size

    def _sample(self, req_id: str, text: list[int], end: int) -> list[int]:
        for position in range(end):
            assert self.cache[self._slot(req_id, position)] == tuple(text[: position + 1]), "a slot holds another prefix"
        if end < len(text):
            return []
        history = self.histories[req_id]
        num_known = len(history)
        for draft_token_id in [*text[num_known:], None]:
            history.append(next_token(history))
            if history[-1] != draft_token_id:
                break
        return history[num_known:]


class Run:
    """A scheduler of random shape, and the calls that an engine could make."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        block_size = rng.choice((1, 2, 4))
        max_num_seqs = rng.randint(1, 6)
        num_speculative_tokens = rng.choice((0, 0, 1, 4))
        self.depth = 1 if num_speculative_tokens else rng.randint(1, 3)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_seqs + rng.randint(0, 30),
                max_model_len=MAX_MODEL_LEN,
                long_prefill_token_threshold=rng.choice((0, 0, 3, 7)),
                policy=rng.choice(("fcfs", "priority")),
                num_speculative_tokens=num_speculative_tokens,
                prompt_lookup_min=1,
                prompt_lookup_max=3,
            ),
            cache=CacheConfig(block_size=block_size, enable_prefix_caching=rng.random() < 0.9, zero_new_blocks=rng.random() < 0.3),
            num_kv_cache_blocks=1 + MAX_MODEL_LEN // block_size + rng.choice((0, 1, 5, 20)),
            eos_token_ids=frozenset({EOS}),
            check_invariants=True,
        )
        self.worker = Worker(block_size)
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
            f"r{self.num_added}", prompt, sampling_params=SamplingParams(**params), priority=rng.randint(0, 2), cache_salt=salt
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
            self.in_flight.append((out, self.worker.run(out)))
            num_steps = 1
        if self.in_flight and (len(self.in_flight) == self.depth or rng.random() < 0.5):
            self.update()
        return num_steps

    def update(self) -> None:
        out, result = self.in_flight.popleft()
        if result.req_ids and self.rng.random() < 0.02:
            result = replace(result, failed_req_ids={self.rng.choice(result.req_ids): "NaN"})
        for output in self.scheduler.update_from_output(out, result):
            if output.finish_reason is not None:
                request = self.live.pop(output.request_id)
                if output.finish_reason != "error":
                    self.check_ended(request)
        self.check_stats()

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
                self.in_flight.append((out, self.worker.run(out)))
            self.update()
        assert not self.live
        check_idle(self.scheduler)
        assert not self.worker.histories
        assert not self.worker.tables


def run_steps(num_steps: int, *, first_seed: int) -> None:
    taken, seed = 0, first_seed
    total = {"preempted": 0, "accepted": 0, "hits": 0}
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
        seed += 1
    assert min(total["preempted"], total["accepted"], total["hits"]) > num_steps // 100, total


def test_some_thousand_random_steps_keep_the_books_and_change_no_token() -> None:
    run_steps(4000, first_seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_240_000_random_steps_keep_the_books_and_change_no_token() -> None:
    run_steps(240_000, first_seed=1000)
