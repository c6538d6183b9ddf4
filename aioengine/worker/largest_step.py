"""A step that takes as much memory beside the weights as any will: what a GPU's memory is measured around."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from aioengine.attention.base import AttentionBackend, AttentionBatch
from aioengine.kv_cache_groups import num_layer_caches, place_of_layers
from aioengine.models.base import CausalLM
from aioengine.resolved_config import CacheConfig, LogprobsMode, SchedulerConfig
from aioengine.sampling_params import MAX_LOGPROBS
from aioengine.worker.prompt_logprobs import PromptRows, score_prompt_rows
from aioengine.worker.sample.states import SamplingStates
from aioengine.worker.warm_up import EVERYTHING


def run_largest_step(
    model: CausalLM,
    *,
    backend: AttentionBackend,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    vocab_size: int,
    device: torch.device,
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> None:
    """A forward of `max_num_batched_tokens` tokens over a cache of one block a layer; the log-probabilities of all of them as
    prompt tokens; then `max_num_seqs` rows that are sampled with every parameter behind the longest outputs."""
    batch = largest_step(scheduler, block_size=cache.block_size, device=device)
    groups = [replace(batch, sliding_window=group.sliding_window) for group in cache.kv_cache_groups]
    metadata = tuple(backend.build_metadata(of_group) for of_group in groups)
    caches = [backend.allocate_kv_cache(1, device) for _ in range(num_layer_caches(cache.kv_cache_groups))]
    kv_caches = [caches[place] for place in place_of_layers(cache.kv_cache_groups)]
    zeros = torch.zeros(batch.num_tokens, dtype=torch.int64, device=device)
    with torch.inference_mode():
        hidden = model.forward(zeros, zeros, kv_caches=kv_caches, attention_metadata=metadata)
        rows = PromptRows([], [], [], indices=zeros, token_ids=zeros)
        score_prompt_rows(hidden[zeros], rows, compute_logits=model.compute_logits, logprobs_mode=logprobs_mode)
        logits = model.compute_logits(hidden[: scheduler.max_num_seqs])
        run_largest_sampling(logits, scheduler=scheduler, vocab_size=vocab_size, logprobs_mode=logprobs_mode)


def run_largest_sampling(
    logits: torch.Tensor,  # [max_num_seqs, vocab_size]
    *,
    scheduler: SchedulerConfig,
    vocab_size: int,
    logprobs_mode: LogprobsMode,
) -> None:
    """All rows with every sampling parameter, a grammar's mask and the longest history."""
    from aioengine.worker.sample.device_sampler import sample_on_device, sampling_arrays, staged_sampling

    device, num_rows = logits.device, logits.shape[0]
    states = SamplingStates(max_num_reqs=num_rows, vocab_size=vocab_size, eos_token_ids=frozenset())
    for slot in range(num_rows):
        states.set(slot, replace(EVERYTHING, logprobs=MAX_LOGPROBS), num_prompt_tokens=scheduler.max_model_len - 1)
    slots = np.arange(num_rows)
    batch = states.gather(slots, np.zeros(num_rows, dtype=np.int64))
    sent = {
        group: {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in arrays.items()}
        for group, arrays in sampling_arrays(batch, slots, vocab_size=vocab_size).items()
    }
    token_table = torch.zeros(num_rows, scheduler.max_model_len, dtype=torch.int32, device=device)
    allowed = torch.full((num_rows, -(-vocab_size // 8)), 255, dtype=torch.uint8, device=device)
    sample_on_device(
        logits,
        staged_sampling(sent, batch, token_table=token_table),
        last_sampled_tokens=torch.zeros(num_rows, dtype=torch.int32, device=device),
        allowed=(torch.arange(num_rows, device=device), allowed),
        logprobs_mode=logprobs_mode,
    )


def largest_step(scheduler: SchedulerConfig, *, block_size: int, device: torch.device) -> AttentionBatch:
    """`max_num_batched_tokens` tokens in prompts as long as they may be, all in block 0: what is computed means nothing."""
    num_tokens = scheduler.max_num_batched_tokens
    longest = min(scheduler.max_model_len, num_tokens)
    lengths = [longest] * (num_tokens // longest) + ([num_tokens % longest] if num_tokens % longest else [])
    seq_lens = np.array(lengths, dtype=np.int32)
    query_start_loc = np.concatenate((np.zeros(1, dtype=np.int32), np.cumsum(seq_lens, dtype=np.int32)))
    max_num_blocks = -(-longest // block_size)
    return AttentionBatch(
        num_reqs=len(lengths),
        num_tokens=num_tokens,
        max_query_len=longest,
        max_seq_len=longest,
        query_start_loc=torch.from_numpy(query_start_loc).to(device),
        query_start_loc_np=query_start_loc,
        seq_lens=torch.from_numpy(seq_lens).to(device),
        seq_lens_np=seq_lens,
        block_table=torch.zeros(len(lengths), max_num_blocks, dtype=torch.int32, device=device),
        slot_mapping=torch.arange(num_tokens, device=device) % block_size,
    )
