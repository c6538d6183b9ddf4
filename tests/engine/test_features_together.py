"""Everything at once, at random: each request that ends by itself gives what it gives alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import pytest

from aioengine import EngineOverloadedError, RequestOutput, RequestTimeoutError, SamplingParams
from aioengine.sampling_params import RequestOutputKind, StructuredOutputsParams
from aioengine.testing import FakeExecutor

NUM_REQS = 60
Told = list[tuple[list[int], str, str | None, int | str | None]]


@dataclass(frozen=True)
class Case:
    """A request, and how its consumer behaves."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    timeout: float | None
    leaves_after: int | None  # outputs
    aborts_after: int | None  # outputs
    fails: bool


def make_cases(rng: random.Random) -> list[Case]:
    shared = [[rng.randrange(97, 123) for _ in range(12)] for _ in range(3)]
    cases = []
    for index in range(NUM_REQS):
        pattern = rng.choice((None, None, r"[a-f]{4}-[0-9]{2,30};", r"(ab)+c"))
        fate = rng.choice(("ends", "ends", "ends", "ends", "leaves", "aborts", "times out", "fails"))
        params = SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            seed=index,
            n=rng.choice((1, 1, 1, 2, 4)),
            max_tokens=rng.randint(1, 30),
            min_tokens=rng.choice((0, 0, 1)),
            ignore_eos=pattern is None,
            stop=rng.choice(((), ("b",), ("1", "7-"))),
            include_stop_str_in_output=rng.random() < 0.5,
            logprobs=rng.choice((None, 0, 2)),
            prompt_logprobs=rng.choice((None, None, 1)),
            output_kind=rng.choice(list(RequestOutputKind)),
            structured_outputs=None if pattern is None else StructuredOutputsParams(regex=pattern),
        )
        if params.output_kind is RequestOutputKind.FINAL_ONLY and fate in ("leaves", "aborts"):
            fate = "ends"
        cases.append(
            Case(
                prompt=rng.choice(shared)[: rng.randint(1, 12)] + [rng.randrange(97, 123) for _ in range(rng.randint(0, 20))],
                params=params,
                priority=rng.randrange(3),
                timeout=rng.uniform(0.001, 0.05) if fate == "times out" else None,
                leaves_after=rng.randint(1, 5) if fate == "leaves" else None,
                aborts_after=rng.randint(1, 5) if fate == "aborts" else None,
                fails=fate == "fails",
            )
        )
    return cases


async def consume(rig: Any, name: str, case: Case) -> Told | None:
    """Ids, text, and reasons of every continuation; None if the request did not come to an end of its own."""
    num_outputs = 0
    parts: list[tuple[list[int], str]] = [([], "") for _ in range(case.params.n)]
    last: RequestOutput | None = None
    stream = rig.engine.generate(case.prompt, case.params, request_id=name, priority=case.priority, timeout=case.timeout)
    async with contextlib.aclosing(stream):
        try:
            async for output in stream:
                last = output
                num_outputs += 1
                if case.params.output_kind is RequestOutputKind.DELTA:
                    parts = [(ids + c.token_ids, text + c.text) for (ids, text), c in zip(parts, output.outputs, strict=True)]
                else:
                    parts = [(c.token_ids, c.text) for c in output.outputs]
                if num_outputs == case.leaves_after:
                    return None
                if num_outputs == case.aborts_after:
                    rig.engine.abort(name)
        except RequestTimeoutError:
            assert case.timeout is not None
            return None
    assert last is not None
    reasons = [c.finish_reason for c in last.outputs]
    if "abort" in reasons:
        assert case.aborts_after is not None
        return None
    if "error" in reasons:
        assert case.fails, last
        return None
    if case.params.prompt_logprobs is not None:
        assert last.prompt_logprobs is not None
        assert len(last.prompt_logprobs) == len(case.prompt)
    return [(*part, c.finish_reason, c.stop_reason) for part, c in zip(parts, last.outputs, strict=True)]


async def run(start_rig: Any, cases: list[Case], rng: random.Random, **options: Any) -> list[Told | None]:
    executor = FakeExecutor(num_blocks=options.pop("num_blocks"), block_size=4, max_num_seqs=8, forward_s=0.0002)
    for index, case in enumerate(cases):
        if case.fails:
            executor.fail_request(f"r{index}" if case.params.n == 1 else f"r{index}-{case.params.n - 1}", num_output_tokens=index % 4)
    async with start_rig(executor, **options) as rig:

        async def client(index: int) -> Told | None:
            await asyncio.sleep(rng.uniform(0, 0.1))
            while True:
                try:
                    return await consume(rig, f"r{index}", cases[index])
                except EngineOverloadedError:
                    await asyncio.sleep(0.002)

        results = await asyncio.gather(*(client(index) for index in range(len(cases))))
        await rig.settle()
        assert len(rig.engine._life.started().structured_output) == 0
        assert rig.engine._life.started().core.scheduler.waiting.num_prompt_tokens == 0
        proposer = rig.engine._life.started().core.scheduler.proposer
        assert proposer is None or not proposer.req_ids
        stats = rig.engine.stats()
        assert (stats.num_preemptions > 0) == (options.get("scheduling_policy") is not None)
        assert (stats.num_draft_tokens > 0) == ("num_speculative_tokens" in options)
        assert (stats.num_rejected_reqs > 0) == ("max_num_queued_reqs" in options)
    return results


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"num_speculative_tokens": 4, "prompt_lookup_min": 1}])
async def test_each_gives_what_it_gives_alone(start_rig: Any, options: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    cases = make_cases(rng)
    plain = [dataclasses.replace(case, timeout=None, leaves_after=None, aborts_after=None, fails=False) for case in cases]
    oracle = await run(start_rig, plain, rng, num_blocks=2000, async_scheduling=False, enable_prefix_caching=False)
    results = await run(
        start_rig, cases, rng, num_blocks=24, scheduling_policy="priority", max_num_queued_reqs=9, max_num_batched_tokens=24, **options
    )
    assert None not in oracle
    assert sum(result is not None for result in results) > NUM_REQS // 3
    for index, (result, expected) in enumerate(zip(results, oracle, strict=True)):
        assert result in (None, expected), f"request {index} {cases[index]}"
