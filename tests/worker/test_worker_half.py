"""What the dashboard derives of the worker from a step's events is what a real worker has in its tables and hands to the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.events.step_event import RequestInfo, StepEvent, StepResultEvent
from aioengine.request import Request
from aioengine.resolved_config import ResolvedConfig
from aioengine.sampling_params import SamplingParams
from aioengine.worker.input_batch import InputBatch
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.worker_half import WorkerHalf, worker_half

SHARED = [5, 11, 23, 42, 8, 30, 17, 2, 50]
BLOCK_SIZE = 4


@pytest.fixture
def pipeline() -> str:
    return "host"


class Watched:
    """The engine's loop over a real runner, with a dashboard that sees the events and a look into the runner's tables."""

    def __init__(self, driver: Any, config: ResolvedConfig, *, num_blocks: int) -> None:
        self.scheduler = Scheduler(
            config.scheduler, cache=config.cache, num_kv_cache_blocks=num_blocks, eos_token_ids=frozenset(), check_invariants=True
        )
        self.depth = config.scheduler.max_concurrent_batches
        self.budget = config.scheduler.max_num_batched_tokens
        self.driver = driver
        self.state = DashboardState()
        self.histories: dict[str, list[int]] = {}  # all known tokens, as the user gets them
        self.num_prompt_tokens: dict[str, int] = {}
        self.batches: list[InputBatch] = []
        self.seen: set[str] = set()  # kinds of effects
        build = driver.runner._pipeline.build_batch

        def build_batch(out: SchedulerOutput) -> InputBatch:
            self.batches.append(build(out))
            return self.batches[-1]

        driver.runner._pipeline.build_batch = build_batch

    def run(self, requests: list[Request]) -> None:
        added = []
        for request in requests:
            self.scheduler.add_request(request)
            self.histories[request.request_id] = list(request.prompt_token_ids)
            self.num_prompt_tokens[request.request_id] = request.num_prompt_tokens
            added.append(RequestInfo(request.request_id, request.num_prompt_tokens, request.max_tokens, 0.0))
        planned: deque[SchedulerOutput] = deque()
        while self.scheduler.has_work or planned:
            while len(planned) < self.depth and (out := self.scheduler.schedule()) is not None:
                planned.append(out)
                self.publish(out, added)
                added = []
            self.step(planned.popleft())

    def publish(self, out: SchedulerOutput, added: list[RequestInfo]) -> None:
        report = self.scheduler.take_report()
        stats, now = self.scheduler.make_stats(), float(out.step_id)
        self.state.apply(
            StepEvent(out.step_id, now, out, stats, report.admission_stop, self.budget, report.block_changes, 1, now, now, list(added))
        )

    def tables(self) -> dict[str, tuple[int, ...]]:
        """The block table of every request that has a row."""
        runner = self.driver.runner
        slots = {req_id: runner.states.slot_of(req_id) for req_id in self.histories}
        (table,) = runner.block_tables.tables
        return {req_id: tuple(table.array[slot, : table.num_blocks[slot]].tolist()) for req_id, slot in slots.items() if slot is not None}

    def step(self, out: SchedulerOutput) -> None:
        before, num_batches = self.tables(), len(self.batches)
        self.driver.runner.execute_model(out)
        record = self.state.step(out.step_id)
        assert record is not None
        half = worker_half(record, block_size=BLOCK_SIZE, num_prompt_tokens=self.num_prompt_tokens)
        self.compare_tables(half, before, out)
        if len(self.batches) > num_batches:
            self.compare_batch(half, self.batches[-1], out)
        else:
            assert out.is_cleanup_only
            assert not half.rows
        sampled = self.driver.sample()
        outputs = self.scheduler.update_from_output(out, sampled)
        for output in outputs:
            self.histories[output.request_id] += output.new_token_ids
        changes, now = self.scheduler.take_report().block_changes, float(out.step_id)
        num_new = {output.request_id: len(output.new_token_ids) for output in outputs}
        self.state.apply(
            StepResultEvent(out.step_id, now, num_new, self.scheduler.make_stats(), changes, 0, None, None, None, None, now, now)
        )

    def compare_tables(self, half: WorkerHalf, before: dict[str, tuple[int, ...]], out: SchedulerOutput) -> None:
        after = self.tables()
        for effect in half.effects:
            self.seen.add(effect.kind)
            if effect.kind in ("forget", "preempt"):
                assert effect.request_id not in after
        for row in half.rows:
            assert row.table_after == after[row.request_id]
            assert row.table_before == (None if row.replaces_table else before[row.request_id])
            if row.replaces_table:
                assert row.request_id not in before or row.request_id in out.preempted_req_ids

    def compare_batch(self, half: WorkerHalf, batch: InputBatch, out: SchedulerOutput) -> None:
        assert [row.request_id for row in half.rows] == batch.req_ids
        assert half.query_start_loc == batch.query_start_loc_np.tolist()
        assert half.seq_lens == batch.seq_lens_np.tolist()
        assert half.positions == batch.positions.tolist()
        assert half.slot_mapping == batch.groups[0].slot_mapping.tolist()
        assert half.logits_indices == batch.logits_indices.tolist()
        token_ids = batch.input_ids.tolist()
        for row in half.rows:
            for source, positions in row.sources:
                self.seen.add(source)
                for position in positions:
                    token_id = token_ids[row.first_token + position - row.positions.start]
                    num_prompt = self.num_prompt_tokens[row.request_id]
                    if source == "draft":
                        drafts = out.scheduled_spec_decode_tokens[row.request_id]
                        assert token_id == drafts[position - positions.start]
                        continue
                    assert (source == "prompt") == (position < num_prompt)
                    assert token_id == self.histories[row.request_id][position]


def make_requests(num_tokens: int = 14) -> list[Request]:
    prompts = [SHARED + [i, 3 * i + 1] * (i % 4) + [i + 20] for i in range(5)]
    return [
        Request(f"r{i}", prompt, sampling_params=SamplingParams(temperature=0.0, seed=i, max_tokens=num_tokens + i, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("options", "num_blocks", "kinds"),
    [
        ({}, 60, {"forget", "add", "append", "unchanged", "prompt", "output"}),
        ({"max_num_batched_tokens": 5}, 60, {"append", "prompt"}),
        ({"max_num_batched_tokens": 16, "async_scheduling": False}, 14, {"preempt", "resume"}),
        ({"max_num_batched_tokens": 16}, 14, {"preempt", "resume"}),
        ({"num_speculative_tokens": 3}, 60, {"draft"}),
    ],
    ids=["plain", "chunks", "preemption", "preemption and overlap", "draft tokens"],
)
def test_the_derived_half_is_the_real_one(
    options: dict[str, Any],
    num_blocks: int,
    kinds: set[str],
    make_driver: Callable[..., Any],
    make_config: Callable[..., ResolvedConfig],
) -> None:
    watched = Watched(make_driver(num_blocks=num_blocks, **options), make_config(**options), num_blocks=num_blocks)
    requests = make_requests()
    if "num_speculative_tokens" in options:  # what repeats itself is guessed
        requests = [
            Request("song", [3, 4, 5, 6] * 6, sampling_params=SamplingParams(temperature=0.0, seed=0, max_tokens=20, ignore_eos=True)),
            *requests,
        ]
    watched.run(requests)
    assert kinds <= watched.seen
