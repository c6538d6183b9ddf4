"""Run by test_hash_seeds.py in processes with different hash seeds: what it prints must not differ.

Line by line: the events of a scheduler that has to share, preempt, draft, fail and abort, with the slots of a worker that
follows it; then the recording of an engine whose every step is asked for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import tempfile
from collections import deque
from pathlib import Path

import orjson

from aioengine import AsyncEngine, SamplingParams, StructuredOutputsParams
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.engine.loop.engine_snapshot import build_snapshot
from aioengine.events.step_event import StepEvent
from aioengine.events.wire import encode
from aioengine.kv_cache_groups import KVCacheGroup
from aioengine.outputs import ModelRunnerOutput
from aioengine.request import Request, RequestStatus
from aioengine.resolved_config import CacheConfig, SchedulerConfig
from aioengine.testing import FakeExecutor, FakeTokenizer
from aioengine.worker.block_table import BlockTables
from aioengine.worker.model_runner import ModelRunner
from aioengine.worker.request_state import RequestStates

MAX_NUM_SEQS = 6
MAX_MODEL_LEN = 64


class Slots:
    """The worker's tables, kept by the runner's own code; instead of a model, a function of the history gives the tokens."""

    def __init__(self) -> None:
        self.runner = object.__new__(ModelRunner)
        self.states = self.runner.states = RequestStates(
            max_num_reqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, vocab_size=50, eos_token_ids=frozenset({3})
        )
        self.runner.block_tables = BlockTables([KVCacheGroup((0,))], max_num_reqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, block_size=4)

    def run(self, out: SchedulerOutput, failing: str | None) -> ModelRunnerOutput:
        self.runner._update_states(out)
        sampled: list[list[int]] = []
        for req_id, num_tokens in out.num_scheduled_tokens.items():
            slot = self.states.slot_of(req_id)
            assert slot is not None
            draft_token_ids = out.scheduled_spec_decode_tokens.get(req_id, [])
            known = int(self.states.num_known_tokens[slot])
            tokens: list[int] = []
            if int(self.states.num_computed_tokens[slot]) + num_tokens == known + len(draft_token_ids):
                history = self.states.token_ids[slot, :known].tolist()
                for draft_token_id in [*draft_token_ids, None]:
                    tokens.append((sum(history[-3:]) * 7 + len(history) // 5) % 11 + 1)
                    history.append(tokens[-1])
                    if tokens[-1] != draft_token_id:
                        break
                self.states.append_accepted(req_id, slot, tokens)
            sampled.append(tokens)
        req_ids = list(out.num_scheduled_tokens)
        failed = {failing: "NaN"} if failing in req_ids else {}
        return ModelRunnerOutput(req_ids, {req_id: i for i, req_id in enumerate(req_ids)}, sampled, failed_req_ids=failed)

    def line(self, req_ids: list[str]) -> str:
        return " ".join(f"{req_id}:{self.states.slot_of(req_id)}" for req_id in req_ids)


def scheduler_script(seed: int, *, policy: str, depth: int, num_draft_tokens: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=24,
            max_model_len=MAX_MODEL_LEN,
            long_prefill_token_threshold=10,
            policy=policy,  # type: ignore[arg-type]
            num_speculative_tokens=num_draft_tokens,
            prompt_lookup_min=1,
            prompt_lookup_max=3,
        ),
        cache=CacheConfig(block_size=4, prefix_caching_seed="test", zero_new_blocks=True),
        num_kv_cache_blocks=26,
        eos_token_ids=frozenset({3}),
        check_invariants=True,
    )
    worker, in_flight = Slots(), deque[tuple[SchedulerOutput, ModelRunnerOutput]]()
    for step in range(100):
        for number in range(rng.choice((0, 0, 1, 4))):
            make_request(scheduler, rng, f"{step}/{number}")
        live = list(scheduler.requests)
        if step % 9 == 4:
            scheduler.finish_requests(rng.sample(live, min(3, len(live))), RequestStatus.FINISHED_ABORTED)
        if step % 40 == 39:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        if len(in_flight) < depth and (out := scheduler.schedule()) is not None:
            failing = next(iter(out.num_scheduled_tokens), None) if step % 13 == 12 else None
            in_flight.append((out, worker.run(out, failing)))
            report = scheduler.take_report()
            event = StepEvent(
                out.step_id, 0.0, out, scheduler.make_stats(), report.admission_stop, 24, report.block_changes, len(in_flight), 0.0, 0.0
            )
            print(encode(event, include_prompts=True).decode(), worker.line(list(scheduler.requests)))
            # The wire sorts what is a set; what the worker gets must be the same without that too.
            print(list(out.num_scheduled_tokens), out.scheduled_cached_reqs.req_ids, out.new_block_ids_to_zero)
        if len(in_flight) == depth or not scheduler.has_work:
            update(scheduler, in_flight)
    snapshot = build_snapshot(scheduler, in_flight=[out for out, _ in in_flight], paused=False, text_source=None)
    print(encode(dataclasses.replace(snapshot, time=0.0)).decode(), list(scheduler.kv_cache_manager.block_pool.free_block_queue))
    stats = scheduler.make_stats()
    assert stats.num_preemptions > 5
    assert stats.num_resumed_reqs > 5
    assert (stats.num_accepted_tokens > 0) == (num_draft_tokens > 0)


def make_request(scheduler: Scheduler, rng: random.Random, name: str) -> None:
    prompt = [1, 2, 4, 5] * rng.randint(0, 4) + [rng.randint(1, 40) for _ in range(rng.randint(1, 9))]
    structured = StructuredOutputsParams(regex="a+") if rng.random() < 0.2 else None
    for index in range(rng.choice((1, 1, 3))):  # the continuations of one prompt
        params = SamplingParams(max_tokens=rng.choice((1, 5, 5, 20)), seed=index, structured_outputs=structured)
        scheduler.add_request(Request(f"{name}-{index}", prompt, sampling_params=params, priority=rng.randint(0, 3)))


def update(scheduler: Scheduler, in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]]) -> None:
    if in_flight:
        out, result = in_flight.popleft()
        print([tuple(output) for output in scheduler.update_from_output(out, result)])


# ---------------------------------------------------------------------------------------------------- an engine
_TIMES = {"time", "arrival_time", "unix_time", "perf_counter", "engine_version"}


def without_times(value: object) -> object:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in _TIMES and not key.endswith(("_start", "_end"))}
    return [without_times(item) for item in value] if isinstance(value, list) else value


async def engine_script(folder: Path) -> None:
    executor = FakeExecutor(num_blocks=40, block_size=4, max_num_seqs=5)
    executor.fail_request("fails", num_output_tokens=3)
    record = folder / "run.jsonl"
    engine = AsyncEngine(
        executor=executor,
        tokenizer=FakeTokenizer(),
        record=record,
        publish_text=True,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        max_model_len=120,
        block_size=4,
        seed=0,
        prefix_caching_seed="s",
    )
    async with engine:
        engine.pause()
        regex = SamplingParams(max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[ab]{5}"), temperature=0)
        ends = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        several = SamplingParams(max_tokens=9, n=3, temperature=0.8, seed=1)
        wanted = [("fails", ends), *((f"r{i}", ends) for i in range(5)), ("several", several), *((f"g{i}", regex) for i in range(3))]
        tasks, num_reqs = [], 0
        for name, params in wanted:
            tasks.append(asyncio.create_task(consume(engine, f"a shared beginning, {name}", params, name)))
            num_reqs += params.n
            await until_waiting(engine, num_reqs)  # one after the other, however long a grammar compiles
        for number in range(80):
            await engine.step()
            if number == 6:
                engine.abort("r4")
            if number == 9:
                engine.reset_prefix_cache(reset_running_requests=True)
        print(await asyncio.gather(*tasks))
        engine.resume()
    for line in record.read_bytes().splitlines():
        print(orjson.dumps(without_times(orjson.loads(line))).decode())


async def consume(engine: AsyncEngine, prompt: str, params: SamplingParams, name: str) -> list[tuple[str, str | None]]:
    output = [output async for output in engine.generate(prompt, params, request_id=name)][-1]
    return [(completion.text, completion.finish_reason) for completion in output.outputs]


async def until_waiting(engine: AsyncEngine, num_reqs: int) -> None:
    for _ in range(5000):
        if engine.stats().num_waiting_reqs == num_reqs:
            for _ in range(5):  # the core wakes up and tells observers who came
                await asyncio.sleep(0)
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"{engine.stats().num_waiting_reqs} requests wait, not {num_reqs}")


def main() -> None:
    for seed, policy, depth, num_draft_tokens in ((1, "fcfs", 2, 0), (2, "priority", 2, 0), (3, "priority", 1, 4), (4, "fcfs", 1, 4)):
        scheduler_script(seed, policy=policy, depth=depth, num_draft_tokens=num_draft_tokens)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(engine_script(Path(folder)))


if __name__ == "__main__":
    main()
