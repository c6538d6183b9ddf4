"""The load generator: no request is lost, and no latency holds what it should not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from aioengine.errors import EngineDeadError
from aioengine_bench.client import Chunk, RequestAborted
from aioengine_bench.datasets import BenchRequest
from aioengine_bench.load import LoadGenerator
from aioengine_bench.stops import Stops

REQUEST = BenchRequest([1, 2, 3], 2)


class ScriptedClient:
    """Answers with two chunks; what a prompt of this length does instead is in `faults`."""

    def __init__(self, *, delay: float = 0.01) -> None:
        self.delay = delay
        self.num_out = 0
        self.max_out = 0
        self.num_closed = 0

    async def send(self, request: BenchRequest, *, request_id: str) -> AsyncIterator[Chunk]:
        self.num_out += 1
        self.max_out = max(self.max_out, self.num_out)
        try:
            yield Chunk(1, "a")
            await asyncio.sleep(self.delay)
            match request.prompt_len:
                case 10:
                    raise ValueError("broken stream")
                case 11:
                    raise RequestAborted("out of patience")
                case 12:
                    raise EngineDeadError("it is dead")
            yield Chunk(1, "b", num_cached_tokens=2)
        finally:
            self.num_out -= 1
            self.num_closed += 1


def prompt(length: int) -> BenchRequest:
    return BenchRequest([1] * length, 2)


@pytest.mark.alone
async def test_records_of_completed_requests() -> None:
    result = await LoadGenerator(ScriptedClient()).run([REQUEST, REQUEST], [0.0, 0.0])
    assert not result.interrupted
    assert [record.outcome for record in result.records] == ["completed"] * 2
    record = result.records[0]
    assert (record.text, record.output_len, record.num_cached_tokens) == ("ab", 2, 2)
    assert record.ttft is not None
    assert record.ttft < 0.01
    assert record.itl[0] >= 0.009
    assert 0.009 <= result.duration < 1.0


async def test_an_error_in_a_stream_is_a_failure_whatever_came_before() -> None:
    result = await LoadGenerator(ScriptedClient()).run([REQUEST, prompt(10), prompt(11)], [0.0] * 3)
    outcomes = {record.prompt_len: (record.outcome, record.error, record.output_len) for record in result.records}
    assert outcomes == {
        3: ("completed", "", 2),
        10: ("failed", "ValueError: broken stream", 1),
        11: ("aborted", "out of patience", 1),
    }


async def test_an_answer_without_content_is_a_failure() -> None:
    class Silent:
        async def send(self, request: BenchRequest, *, request_id: str) -> AsyncIterator[Chunk]:
            for chunk in list[Chunk]():
                yield chunk

    result = await LoadGenerator(Silent()).run([REQUEST], [0.0])
    assert result.records[0].outcome == "failed"


@pytest.mark.alone
async def test_concurrency_is_limited_and_the_wait_is_told_apart() -> None:
    client = ScriptedClient(delay=0.02)
    result = await LoadGenerator(client, max_concurrency=2).run([REQUEST] * 6, [0.0] * 6)
    assert client.max_out == 2
    last = max(result.records, key=lambda record: record.send_time)
    assert last.client_queue_time >= 0.035
    assert last.ttft is not None
    assert last.ttft < 0.015


@pytest.mark.alone
async def test_requests_are_sent_when_they_are_due() -> None:
    result = await LoadGenerator(ScriptedClient(delay=0.0)).run([REQUEST] * 3, [0.0, 0.05, 0.1])
    for record, due in zip(sorted(result.records, key=lambda r: r.index), [0.0, 0.05, 0.1], strict=True):
        assert record.due_time - result.start_time == pytest.approx(due)
        assert 0 <= record.send_time - record.due_time < 0.04


@pytest.mark.alone
async def test_cancelling_keeps_what_there_is() -> None:
    client = ScriptedClient(delay=0.05)
    task = asyncio.create_task(LoadGenerator(client).run([REQUEST] * 4, [0.0, 0.0, 0.07, 5.0]))
    await asyncio.sleep(0.09)
    task.cancel()
    result = await task
    assert result.interrupted
    assert sorted(record.outcome for record in result.records) == ["aborted", "completed", "completed"]
    aborted = next(record for record in result.records if record.outcome == "aborted")
    assert (aborted.error, aborted.output_len) == ("interrupted", 1)
    assert client.num_closed == 3, "every stream was closed"


async def test_a_dead_engine_ends_the_run() -> None:
    with pytest.raises(EngineDeadError, match="it is dead"):
        await LoadGenerator(ScriptedClient()).run([prompt(12), REQUEST], [0.0, 0.3])


async def test_progress_is_told() -> None:
    seen = []
    await LoadGenerator(ScriptedClient(), on_done=lambda record: seen.append(record.index)).run([REQUEST] * 3, [0.0] * 3)
    assert sorted(seen) == [0, 1, 2]


async def test_a_run_ends_when_its_time_is_up() -> None:
    client = ScriptedClient(delay=5.0)
    result = await LoadGenerator(client, stops=Stops(max_duration=0.05)).run([REQUEST] * 3, [0.0, 0.0, 60.0])
    assert result.stop_reason == "the 0.05 seconds of --max-duration are over"
    assert not result.interrupted
    assert [(record.outcome, record.error) for record in result.records] == [("aborted", "the run was stopped")] * 2
    assert client.num_closed == 2
    assert 0.05 <= result.duration < 5.0


async def test_a_run_ends_when_too_many_requests_fail() -> None:
    requests = [prompt(10), REQUEST] * 20
    due = [0.0] * 14 + [60.0] * 26
    result = await LoadGenerator(ScriptedClient(delay=0.0), stops=Stops(max_error_rate=0.4)).run(requests, due)
    assert result.stop_reason is not None
    assert "requests failed, more than the share of 0.4" in result.stop_reason
    assert len(result.records) < 20
    assert (await LoadGenerator(ScriptedClient(delay=0.0), stops=Stops(max_error_rate=0.9)).run(requests, [0.0] * 40)).stop_reason is None


async def test_a_run_ends_when_the_server_falls_behind() -> None:
    class Busy(ScriptedClient):
        async def send(self, request: BenchRequest, *, request_id: str) -> AsyncIterator[Chunk]:
            await asyncio.sleep(60.0)
            yield Chunk(1, "a")

    result = await LoadGenerator(Busy(), stops=Stops(max_waiting=3)).run([REQUEST] * 9, [0.0] * 8 + [60.0])
    assert result.stop_reason == "over-saturated: 4 requests wait for their first token, and --max-waiting is 3"
    # Requests that have their first token, or have ended, do not wait.
    kept_up = await LoadGenerator(ScriptedClient(), stops=Stops(max_waiting=1)).run([REQUEST] * 4, [0.0, 0.05, 0.1, 0.15])
    assert kept_up.stop_reason is None
    assert len(kept_up.records) == 4


async def test_an_interrupted_run_was_not_stopped() -> None:
    task = asyncio.create_task(LoadGenerator(ScriptedClient(delay=5.0), stops=Stops(max_duration=60.0)).run([REQUEST], [0.0]))
    await asyncio.sleep(0.02)
    task.cancel()
    result = await task
    assert (result.interrupted, result.stop_reason) == (True, None)
    assert result.records[0].error == "interrupted"


async def test_an_end_marker_is_part_of_no_latency() -> None:
    """It comes late, has no text and no token, and says why the answer ended."""

    class LateEnd:
        async def send(self, request: BenchRequest, *, request_id: str) -> AsyncIterator[Chunk]:
            yield Chunk(1, "a")
            await asyncio.sleep(0.05)
            yield Chunk(0, finish_reason="stop", queue_time=0.25)

    (record,) = (await LoadGenerator(LateEnd()).run([REQUEST], [0.0])).records
    assert (record.chunk_sizes, record.itl, record.finish_reason, record.queue_time) == ((1,), [], "stop", 0.25)
    assert record.e2el == record.ttft
