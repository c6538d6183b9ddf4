"""How much of a GPU's memory the KV cache may take: what is left of the allowed share at the peak of the largest step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from aioengine.attention.base import AttentionBackend, AttentionBatch
from aioengine.config import SchedulerConfig
from aioengine.models.base import CausalLM


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Readings in bytes, taken around a run of the largest step."""

    total: int  # of the device
    free: int  # after the run, as the driver says
    allocator_peak: int  # the most that torch's allocator had handed out during the run: weights and activations
    allocator_reserved: int  # what it holds after the run, in use or not


def kv_cache_bytes(profile: MemoryProfile, *, utilization: float) -> int:
    """utilization x total - peak, not below 0.

    The peak is the allocator's, and what lies outside of it: the CUDA context, libraries' workspaces, other processes. CUDA
    graphs are captured later and take theirs from what the share leaves free: the activations of at most 512 tokens.
    """
    outside = profile.total - profile.free - profile.allocator_reserved
    return max(int(utilization * profile.total) - profile.allocator_peak - max(outside, 0), 0)


def run_largest_step(
    model: CausalLM, *, backend: AttentionBackend, scheduler: SchedulerConfig, block_size: int, device: torch.device
) -> None:
    """A forward of `max_num_batched_tokens` tokens and the logits of `max_num_seqs` rows, over a cache of one block a layer."""
    batch = largest_step(scheduler, block_size=block_size, device=device)
    kv_caches = [backend.allocate_kv_cache(1, device) for _ in range(model.num_layers)]
    zeros = torch.zeros(batch.num_tokens, dtype=torch.int64, device=device)
    with torch.inference_mode():
        hidden = model.forward(zeros, zeros, kv_caches=kv_caches, attention_metadata=backend.build_metadata(batch))
        logits = model.compute_logits(hidden[: scheduler.max_num_seqs])
        logits.clone()  # as the sampler does where all ask for log-probabilities


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
