"""`call_when_ready()` and `take_ready()`: reading many streams without a task for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aioengine import AioEngineError, EngineDeadError, RequestTimeoutError, SamplingParams
from aioengine.engine.outputs.output_stream import OutputStream
from aioengine.outputs import RequestOutput
from aioengine.sampling_params import RequestOutputKind
from aioengine.testing import FakeExecutor

DELTAS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
PROMPT = list(b"hello")


@pytest.fixture
async def rig(start_rig: Any) -> AsyncIterator[Any]:
    async with start_rig() as rig:
        yield rig
        await rig.settle()


class Reader:
    """Takes in a turn of the loop of its own, as a server does."""

    def __init__(self, stream: OutputStream, first: RequestOutput) -> None:
        self.stream = stream
        self.outputs = [first]
        self.error: Exception | None = None
        self.num_calls = 0
        self.done = asyncio.Event()
        if first.finished:
            self.done.set()
        stream.call_when_ready(self.on_ready)

    def on_ready(self) -> None:
        self.num_calls += 1
        asyncio.get_running_loop().call_soon(self.take)

    def take(self) -> None:
        try:
            output = self.stream.take_ready()
        except AioEngineError as exc:
            self.error = exc
            self.done.set()
            return
        if output is not None:
            self.outputs.append(output)
            if output.finished:
                self.done.set()

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.outputs[0].token_ids]


async def reader(stream: OutputStream) -> Reader:
    return Reader(stream, await anext(stream))


async def test_it_says_the_same_as_the_iteration(rig: Any) -> None:
    expected = [token_id async for output in rig.engine.generate(PROMPT, DELTAS) for token_id in output.outputs[0].token_ids]
    readers = [await reader(rig.engine.generate(PROMPT, DELTAS)) for _ in range(8)]
    for one in readers:
        await asyncio.wait_for(one.done.wait(), 5)
        assert one.token_ids == expected
        assert one.num_calls == len(one.outputs) - 1, "one call for each output that was taken"
        assert one.stream.take_ready() is None, "nothing follows"
        with pytest.raises(StopAsyncIteration):
            await anext(one.stream)


async def test_who_does_not_take_is_called_once_and_gets_it_merged(rig: Any) -> None:
    stream = rig.engine.generate(PROMPT, DELTAS)
    first = await anext(stream)
    calls: list[None] = []
    stream.call_when_ready(lambda: calls.append(None))
    await rig.settle()
    assert len(calls) == 1
    output = stream.take_ready()
    assert output is not None
    assert output.finished
    assert len(first.outputs[0].token_ids) + len(output.outputs[0].token_ids) == 40


async def test_what_is_there_already_is_told_at_once(rig: Any) -> None:
    stream = rig.engine.generate(PROMPT, DELTAS)
    await anext(stream)
    await rig.settle()
    calls: list[None] = []
    stream.call_when_ready(lambda: calls.append(None))
    assert len(calls) == 1
    await stream.aclose()
    assert stream.take_ready() is None


async def test_it_needs_a_first_output_that_was_read(rig: Any) -> None:
    stream = rig.engine.generate(PROMPT, DELTAS)
    with pytest.raises(AioEngineError, match="first output"):
        stream.call_when_ready(lambda: None)
    with pytest.raises(AioEngineError, match="first output"):
        stream.take_ready()
    await stream.aclose()
    assert stream.take_ready() is None
    ended = rig.engine.generate(PROMPT, SamplingParams(max_tokens=1))
    assert (await anext(ended)).finished
    ended.call_when_ready(pytest.fail)  # nobody is called


async def test_another_event_loop_is_told_so(rig: Any) -> None:
    stream = rig.engine.generate(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
    await anext(stream)

    async def elsewhere() -> None:
        stream.take_ready()

    with pytest.raises(AioEngineError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, elsewhere())
    await stream.aclose()


async def test_closing_the_stream_ends_the_request(rig: Any) -> None:
    one = await reader(rig.engine.generate(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True)))
    await one.stream.aclose()
    await rig.settle()
    assert one.stream.take_ready() is None


@pytest.mark.parametrize(
    ("options", "end", "error"),
    [({"timeout": 0.05}, None, RequestTimeoutError), ({}, lambda engine: engine.shutdown(), EngineDeadError)],
    ids=["timeout", "shutdown"],
)
async def test_errors_are_raised_by_taking(start_rig: Any, options: Any, end: Callable[[Any], Any] | None, error: type[Exception]) -> None:
    executor = FakeExecutor(num_blocks=600, block_size=4, forward_s=0.002)
    async with start_rig(executor) as rig:
        one = await reader(rig.engine.generate(PROMPT, SamplingParams(max_tokens=1000, ignore_eos=True), **options))
        if end is not None:
            await end(rig.engine)
        await asyncio.wait_for(one.done.wait(), 5)
        assert isinstance(one.error, error) or one.outputs[-1].outputs[0].finish_reason == "abort"
        assert one.stream.take_ready() is None
