"""Test a program without a model: the real scheduler, a pretended device. Run it: pytest fake_engine_test.py"""

import asyncio

from aioengine import AsyncEngine, SamplingParams
from aioengine.testing import FakeExecutor, FakeTokenizer, scripted


async def summarize(engine: AsyncEngine, texts: list[str]) -> list[str]:
    """The program that is tested."""
    prompts = [f"Sum this up in one line: {text}" for text in texts]
    outputs = await engine.generate_batch(prompts, SamplingParams(max_tokens=40), progress=False)
    return [output.text.strip() for output in outputs]


def test_every_text_gets_a_summary_in_its_order() -> None:
    async def scenario() -> None:
        executor = FakeExecutor(next_token=scripted("Short."), forward_s=0.001)
        async with AsyncEngine(executor=executor, tokenizer=FakeTokenizer()) as engine:
            assert await summarize(engine, ["a long story", "another"]) == ["Short.", "Short."]
        batched = max(len(output.num_scheduled_tokens) for output in executor.outputs)
        assert batched == 2  # both were in one batch

    asyncio.run(scenario())
