"""The overlapped loop: the same tokens as one step at a time, in less time; what it publishes; and rest when idle."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from aioengine.events.recording.reader import read_recording
from aioengine.events.step_event import EngineSnapshot, StepEvent, StepResultEvent
from aioengine.sampling_params import SamplingParams
from aioengine.testing import FakeExecutor, scripted

PROMPTS = [[(7 * index + position) % 256 for position in range(3 + 9 * index)] for index in range(12)]
PARAMS = [SamplingParams(temperature=index % 2, seed=index, max_tokens=5 + 3 * index) for index in range(12)]


async def tokens(start_rig: Any, **options: Any) -> list[list[int]]:
    num_blocks = options.pop("num_blocks", 400)
    async with start_rig(FakeExecutor(num_blocks=num_blocks, block_size=4, max_num_seqs=options.get("max_num_seqs", 8)), **options) as rig:
        outputs = await rig.engine.generate_batch(PROMPTS, PARAMS)
        await rig.settle()
        assert (rig.engine.stats().num_preemptions > 0) == (num_blocks == 40)
        return [output.token_ids for output in outputs]


async def test_every_way_of_scheduling_gives_the_same_tokens(start_rig: Any) -> None:
    """The oracle is each request alone, one step at a time."""
    oracle = await tokens(start_rig, max_num_seqs=1, async_scheduling=False, enable_prefix_caching=False, max_num_batched_tokens=256)
    assert [len(t) for t in oracle] == [params.max_tokens for params in PARAMS]
    for overlap in (True, False):
        for num_blocks in (400, 40):
            for budget in (8, 256):
                for prefix_caching in (True, False):
                    result = await tokens(
                        start_rig,
                        async_scheduling=overlap,
                        num_blocks=num_blocks,
                        max_num_batched_tokens=budget,
                        enable_prefix_caching=prefix_caching,
                    )
                    assert result == oracle, (overlap, num_blocks, budget, prefix_caching)


async def test_steps_overlap(start_rig: Any) -> None:
    """Two steps are in flight at once; with async_scheduling=False one."""
    for overlap, depth in ((True, 2), (False, 1)):
        async with start_rig(FakeExecutor(block_size=4, forward_s=0.002), async_scheduling=overlap) as rig:
            with rig.engine.events() as subscription:
                await rig.engine.generate_batch([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=10))
                events = subscription.drain()
        assert max(event.queue_depth for event in events if isinstance(event, StepEvent)) == depth


async def test_a_new_request_does_not_wait_for_the_step_in_flight_to_be_scheduled(start_rig: Any) -> None:
    executor = FakeExecutor(block_size=4)
    executor.hang_at(1)
    async with start_rig(executor) as rig:
        one_token = SamplingParams(temperature=0, max_tokens=1)
        first = asyncio.create_task(anext(rig.engine.generate([1], one_token)))
        with rig.engine.events() as subscription:
            await anext(subscription)  # step 1 hangs; it already samples the last token of its request
            second = asyncio.create_task(anext(rig.engine.generate([2], one_token)))
            event = await asyncio.wait_for(anext(subscription), 5)
            assert isinstance(event, StepEvent)
            assert event.queue_depth == 2
        executor.release()
        await asyncio.gather(first, second)


# ---------------------------------------------------------------------------------------------------- events
@pytest.mark.parametrize("overlap", [True, False])
async def test_events_tell_of_each_request_once(start_rig: Any, overlap: bool) -> None:
    executor = FakeExecutor(num_blocks=40, block_size=4, next_token=scripted("some text END"))
    async with start_rig(executor, async_scheduling=overlap) as rig:
        with rig.engine.events(maxlen=10_000) as subscription:
            await asyncio.gather(
                rig.engine.generate_batch([[i] * 9 for i in range(5)], SamplingParams(temperature=0, max_tokens=20, stop=("END",))),
                rig.engine.generate_batch([[i] * 5 for i in range(5)], SamplingParams(temperature=0, max_tokens=4)),
                rig.engine.generate_batch([[i] * 7 for i in range(5)], SamplingParams(temperature=0, max_tokens=50)),
            )
            stream = rig.engine.generate([1], SamplingParams(temperature=0, max_tokens=10), request_id="gone")
            await anext(stream)
            await stream.aclose()
            await rig.settle()
            events = subscription.drain()
    steps = [event for event in events if isinstance(event, StepEvent)]
    results = [event for event in events if isinstance(event, StepResultEvent)]
    both: list[StepEvent | StepResultEvent] = [*steps, *results]
    assert [event.step_id for event in steps] == [event.step_id for event in results] == list(range(1, len(steps) + 1))
    added = [info.request_id for event in both for info in event.added]
    ended = [info for event in both for info in event.finished]
    assert len(added) == len(set(added)) == len(ended) == 16
    assert {info.request_id for info in ended} == set(added)
    assert Counter((info.finish_reason, info.stop_reason) for info in ended) == {
        ("stop", "END"): 5,
        ("length", None): 5,
        ("stop", None): 5,
        ("abort", None): 1,
    }
    assert {info.num_output_tokens for info in ended if info.finish_reason == "length"} == {4}
    assert {info.num_output_tokens for info in ended if info.stop_reason == "END"} == {13}
    assert results[-1].stats.num_free_blocks == results[-1].stats.num_total_blocks
    balance = sum(len(event.block_changes.allocated) - len(event.block_changes.freed) for event in both)
    assert balance == 0, "every allocation and every free was told"
    result = results[0]
    times = [result.execute_start, result.execute_end, result.sample_start, result.sample_end, result.update_start, result.update_end]
    assert all(time is not None for time in times)
    assert [time or 0.0 for time in times] == sorted(time or 0.0 for time in times)


async def test_a_request_that_never_ran_does_not_stay_on_the_screen(rig: Any) -> None:
    with rig.engine.events() as subscription:
        task = asyncio.create_task(anext(rig.engine.generate([1, 2], request_id="a")))
        await asyncio.sleep(0)
        assert rig.engine.abort("a")
        assert (await task).finish_reason == "abort"
        await rig.settle()
        await asyncio.sleep(0.01)
        events = subscription.drain()
    last = events[-1]
    assert last.stats.num_waiting_reqs == last.stats.num_running_reqs == 0
    if not any(isinstance(event, StepEvent) for event in events):
        assert isinstance(last, EngineSnapshot)


async def test_snapshot(start_rig: Any) -> None:
    executor = FakeExecutor(num_blocks=20, block_size=4)
    async with start_rig(executor, max_num_seqs=1) as rig:
        stream = rig.engine.generate(list(range(9)), SamplingParams(temperature=0, max_tokens=40), request_id="a")
        await anext(stream)
        other = asyncio.create_task(anext(rig.engine.generate([1], request_id="b", priority=3)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        snapshot = rig.engine.snapshot()
        running, waiting = snapshot.requests
        assert (running.request_id, running.status, running.num_prompt_tokens, running.max_tokens) == ("a", "RUNNING", 9, 40)
        assert len(running.block_ids) >= 3
        assert (waiting.request_id, waiting.status, waiting.block_ids, waiting.priority) == ("b", "WAITING", [], 3)
        assert set(running.block_ids[:2]) <= set(snapshot.cached_block_ids)
        assert snapshot.stats == rig.engine.stats()
        await stream.aclose()
        await other


async def test_a_broken_observer_is_dropped_and_the_engine_goes_on(rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: object) -> None:
        raise ValueError("observer")

    rig.engine.bus.add_observer(broken)
    outputs = await rig.engine.generate_batch([[1], [2]])
    assert all(output.finish_reason == "length" for output in outputs)
    assert "was removed" in caplog.text


async def test_a_recording_holds_every_event(start_rig: Any, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    async with start_rig(record=path) as rig:
        with rig.engine.events(maxlen=1000) as subscription:
            await rig.engine.generate_batch([[1, 2], [3]])
            await rig.settle()
            events = subscription.drain()
    recording = read_recording(path)
    assert recording.header.model == "fake"
    assert recording.header.config["scheduler"]["max_num_seqs"] == 8
    recorded = [(type(event), event.step_id, event.stats) for event in recording.events]
    assert recorded[:-1] == [(type(event), event.step_id, event.stats) for event in events]
    assert recorded[-1][0] is EngineSnapshot, "the last word, at shutdown"


# ---------------------------------------------------------------------------------------------------- idle
@pytest.mark.alone
@pytest.mark.parametrize("uses", [0, 1])
async def test_an_idle_engine_uses_no_cpu(start_rig: Any, uses: int) -> None:
    async with start_rig() as rig:
        for _ in range(uses):
            await rig.engine.generate_batch([[1, 2, 3]])
            await rig.settle()
        await asyncio.sleep(0.05)
        before = time.process_time()
        await asyncio.sleep(1)
        used = time.process_time() - before
        assert used < 0.01, f"{used:.4f} s of CPU in an idle second"
