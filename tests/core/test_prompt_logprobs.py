"""A request that wants log-probabilities of its prompt has to compute all of it; what the worker reports goes on to the engine."""

from __future__ import annotations

from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.outputs import EngineCoreOutput, Logprob, ModelRunnerOutput, TokenLogprobs
from aioengine.request import Request
from aioengine.resolved_config import CacheConfig, SchedulerConfig
from aioengine.sampling_params import SamplingParams

PROMPT = [100 + i for i in range(14)]


def make_scheduler(num_blocks: int = 64, *, budget: int = 64) -> Scheduler:
    return Scheduler(
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=128),
        cache=CacheConfig(block_size=4),
        num_kv_cache_blocks=num_blocks,
        check_invariants=True,
    )


def request(request_id: str, *, prompt_logprobs: int | None = None, max_tokens: int = 8) -> Request:
    return Request(request_id, PROMPT, sampling_params=SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs))


def step(
    scheduler: Scheduler, tokens: dict[str, list[int]], prompt: dict[str, list[TokenLogprobs]] | None = None
) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    out = scheduler.schedule()
    assert out is not None
    ids = list(out.num_scheduled_tokens)
    result = ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, [tokens.get(r, []) for r in ids], prompt_logprobs=prompt or {})
    return out, scheduler.update_from_output(out, result)


def test_it_takes_no_cached_prefix_but_leaves_one_for_others() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(request("first", prompt_logprobs=0, max_tokens=1))
    step(scheduler, {"first": [7]})
    scheduler.add_request(request("plain"))
    scheduler.add_request(request("wants", prompt_logprobs=0))
    out, _ = step(scheduler, {"plain": [7], "wants": [7]})
    assert {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs} == {"plain": 12, "wants": 0}
    assert out.num_scheduled_tokens == {"plain": 2, "wants": 14}
    stats = scheduler.make_stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (14, 12), "who may not look anything up does not count"


def test_after_a_preemption_the_cache_serves_it_only_if_all_of_the_prompt_is_reported() -> None:
    for num_steps, starts_at in ((1, 0), (2, 12)):
        scheduler = make_scheduler(budget=8)
        wants = request("wants", prompt_logprobs=0)
        scheduler.add_request(wants)
        for index in range(num_steps):
            step(scheduler, {"wants": [7] if index == 1 else []})
        scheduler.running.remove(wants)
        scheduler.kv_cache_manager.free(wants)
        wants.num_computed_tokens = 0
        assert len(scheduler.kv_cache_manager.get_computed_blocks(wants)[0]) * 4 == starts_at


def test_entries_come_with_their_chunk_also_without_a_token() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add_request(request("wants", prompt_logprobs=0))
    entries: list[TokenLogprobs] = [{token: Logprob(-1.0, 1)} for token in PROMPT[1:]]
    _, (first,) = step(scheduler, {}, {"wants": entries[:8]})
    assert (first.new_token_ids, first.finish_reason, first.prompt_logprobs) == ([], None, entries[:8])
    _, (second,) = step(scheduler, {"wants": [7]}, {"wants": entries[8:]})
    assert (second.new_token_ids, second.prompt_logprobs) == ([7], entries[8:])
    _, (third,) = step(scheduler, {"wants": [7]})
    assert third.prompt_logprobs is None
