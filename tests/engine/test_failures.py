"""A failing step ends every stream with its cause, tells what happened, and leaves the engine dead."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from aioengine.errors import EngineDeadError
from aioengine.sampling_params import SamplingParams
from aioengine.testing import FakeExecutor, FakeTokenizer

ENDLESS = SamplingParams(temperature=0, max_tokens=200)
SECRET = "my secret prompt"


class Boom(Exception):
    pass


async def stream_to_the_end(engine: Any, prompt: Any, **options: Any) -> None:
    async for _ in engine.generate(prompt, ENDLESS, **options):
        pass


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("phase", ["execute", "sample"])
@pytest.mark.parametrize("step", [1, 5])
async def test_a_failing_step(start_rig: Any, caplog: pytest.LogCaptureFixture, phase: Any, step: int, overlap: bool) -> None:
    boom = Boom("out of cheese")
    executor = FakeExecutor(block_size=4)
    executor.fail_at(step, phase=phase, exception=boom)
    async with start_rig(executor, async_scheduling=overlap, max_num_seqs=2) as rig:
        streams = [stream_to_the_end(rig.engine, prompt) for prompt in (SECRET, [1, 2, 3], "waits for a place")]
        results = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 5)
        for error in results:
            assert isinstance(error, EngineDeadError)
            assert error.__cause__ is boom
            assert "out of cheese" in str(error)
        assert len({id(error) for error in results}) == 3

        # It stays dead.
        with pytest.raises(EngineDeadError) as info:
            rig.engine.check_health()
        assert info.value.__cause__ is boom
        with pytest.raises(EngineDeadError) as info:
            await stream_to_the_end(rig.engine, [1])
        assert info.value.__cause__ is boom
        with pytest.raises(EngineDeadError):
            await rig.engine.generate_batch([[1]])
        assert not rig.engine.abort("anything")
        assert rig.engine.snapshot().stats.num_running_reqs > 0, "what the scheduler held can still be looked at"
    assert executor.is_shut_down
    # The log holds what the step was and what led to it, but nobody's prompt.
    assert f"step {step}:" in caplog.text
    assert "the last" in caplog.text
    assert "scheduled step 1" in caplog.text
    assert "injected" not in caplog.text
    assert str(FakeTokenizer().encode(SECRET)[3:8])[1:-1] not in caplog.text
    assert SECRET not in caplog.text


async def test_outputs_before_the_failure_are_kept(start_rig: Any) -> None:
    """A request that ended before the step failed has ended well, even if its consumer was slow."""
    executor = FakeExecutor(block_size=4)
    executor.fail_at(20)
    async with start_rig(executor) as rig:
        quick = rig.engine.generate([1], SamplingParams(temperature=0, max_tokens=4))
        await anext(quick)
        with pytest.raises(EngineDeadError):
            await stream_to_the_end(rig.engine, [2])
        assert [output async for output in quick][-1].finish_reason == "length"


async def test_a_forward_that_fails_and_a_sampler_that_never_returns(start_rig: Any) -> None:
    class LostSample(FakeExecutor):
        def _sample(self, grammar_output: Any) -> Any:
            self._released.wait()

    executor = LostSample(block_size=4)
    executor.fail_at(1, exception=Boom("forward"))
    async with start_rig(executor) as rig:
        with pytest.raises(EngineDeadError) as info:
            await asyncio.wait_for(stream_to_the_end(rig.engine, [1]), 5)
        assert isinstance(info.value.__cause__, Boom)


async def test_an_executor_that_cannot_take_a_step(start_rig: Any) -> None:
    async with start_rig() as rig:
        rig.executor.shutdown()
        with pytest.raises(EngineDeadError):
            await stream_to_the_end(rig.engine, [1])


async def test_shutdown_during_a_hanging_step(start_rig: Any) -> None:
    executor = FakeExecutor(block_size=4)
    executor.hang_at(2)
    async with start_rig(executor) as rig:
        task = asyncio.create_task(stream_to_the_end(rig.engine, [1]))
        await asyncio.sleep(0.02)
        await asyncio.wait_for(rig.engine.shutdown(), 5)
        with pytest.raises(EngineDeadError, match="shut down"):
            await task


async def test_a_worker_that_breaks_the_contract_is_caught(start_rig: Any) -> None:
    """The strictness of FakeExecutor reaches the user: nothing is swallowed on the way."""
    async with start_rig() as rig:
        stream = rig.engine.generate([1, 2], ENDLESS)
        await anext(stream)
        await asyncio.wrap_future(rig.executor.collective_rpc("forget_all"))
        with pytest.raises(EngineDeadError, match="is unknown here but comes as a difference"):
            async for _ in stream:
                pass


async def test_a_tokenizer_that_fails_ends_one_request_only(start_rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Picky(FakeTokenizer):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            if 0 in token_ids:
                raise ValueError("cannot decode this")
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    executor = FakeExecutor(block_size=4, next_token=lambda known, n, params: 0 if known[0] == 5 and len(known) - n == 3 else 97)
    async with start_rig(executor, tokenizer=Picky()) as rig:
        bad, good = await rig.engine.generate_batch([[5], [6]], SamplingParams(temperature=0, max_tokens=10))
        assert (bad.finish_reason, bad.text) == ("error", "aaa")
        assert "cannot decode this" in str(bad.outputs[0].stop_reason)
        assert (good.finish_reason, good.text) == ("length", "a" * 10)
        assert "could not be processed" in caplog.text
        await rig.settle()
