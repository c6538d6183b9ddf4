"""Steps that use every kernel once: what a runner is taken through before its first user."""

from __future__ import annotations

from aioengine.core.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from aioengine.resolved_config import SchedulerConfig
from aioengine.sampling_params import SamplingParams

_PROMPT_LEN = 64  # enough for the large query tiles of attention
_BLOCK_ID = 1  # block 0 is the null block
_GREEDY = SamplingParams(temperature=0, max_tokens=2, seed=0)
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    max_tokens=2,
    min_tokens=2,
    logprobs=2,
    prompt_logprobs=2,
    presence_penalty=0.1,
    logit_bias={0: 1.0},
    bad_words_token_ids=((1,), (1, 0)),
    seed=0,
)


def warm_up_steps(scheduler: SchedulerConfig, *, block_size: int, num_groups: int = 1, zero_blocks: bool = False) -> list[SchedulerOutput]:
    """Prompts, a decode step and the clean-up, of a greedy request and of one with every sampling parameter.

    All their positions lie in block 1, in every KV-cache group: the tokens mean nothing. No decode step if two output tokens exceed
    `max_model_len`.
    """
    ids = [f"warm-up {i}" for i in range(min(2, scheduler.max_num_seqs))]
    length = max(min(_PROMPT_LEN, scheduler.max_model_len - 2, scheduler.max_num_batched_tokens // len(ids)), 1)
    blocks = ([_BLOCK_ID] * -(-(length + 1) // block_size),) * num_groups
    # The one with everything alone if there is room for one: it uses what the greedy one uses.
    params = [EVERYTHING, _GREEDY][: len(ids)]
    prompts = SchedulerOutput(
        step_id=0,
        scheduled_new_reqs=[NewRequestData(req_id, [0] * length, param, blocks, 0) for req_id, param in zip(ids, params, strict=True)],
        scheduled_cached_reqs=CachedRequestData(),
        num_scheduled_tokens=dict.fromkeys(ids, length),
        total_num_scheduled_tokens=length * len(ids),
        new_block_ids_to_zero=[_BLOCK_ID] if zero_blocks else [],
    )
    decode = SchedulerOutput(
        step_id=0,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=ids,
            new_block_ids=[None] * len(ids),
            num_computed_tokens=[length] * len(ids),
            num_output_tokens=[1] * len(ids),
        ),
        num_scheduled_tokens=dict.fromkeys(ids, 1),
        total_num_scheduled_tokens=len(ids),
    )
    clean_up = SchedulerOutput(0, [], CachedRequestData(), {}, 0, finished_req_ids=frozenset(ids))
    return [prompts, decode, clean_up] if length + 2 <= scheduler.max_model_len else [prompts, clean_up]
