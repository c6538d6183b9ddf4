"""Small model facts, requests and schedulers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from aioengine.core.scheduler import Scheduler
from aioengine.request import Request
from aioengine.resolved_config import CacheConfig, ModelInfo, SchedulerConfig
from aioengine.sampling_params import SamplingParams
from aioengine.testing.tokens import BOS_TOKEN_ID, EOS_TOKEN_ID, VOCAB_SIZE

_request_numbers = itertools.count(1)


def make_model_info(
    *, vocab_size: int = VOCAB_SIZE, max_position_embeddings: int = 4096, layer_windows: Sequence[int | None] = (None,)
) -> ModelInfo:
    """The facts of a model that does not exist. layer_windows: the sliding window of each layer, None: it sees everything."""
    return ModelInfo(
        name="fake",
        path="",
        architecture="Fake",
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        num_layers=len(layer_windows),
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        dtype="float32",
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        bos_token_id=BOS_TOKEN_ID,
        layer_windows=tuple(layer_windows),
    )


def make_request(
    prompt: int | Sequence[int] = 8,
    *,
    request_id: str | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    num_external_blocks: int = 0,
    **params: Any,
) -> Request:
    """A request as the input processor would hand it to the scheduler.

    prompt: token ids, or how many (then ids that differ from other requests' are made up). params: of SamplingParams.
    """
    number = next(_request_numbers)
    token_ids = [(number * 31 + index * 7) % 256 for index in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Request(
        request_id or f"test-{number}",
        token_ids,
        sampling_params=SamplingParams(**{"temperature": 0.0, "seed": 0, **params}),
        arrival_time=float(number),
        priority=priority,
        cache_salt=cache_salt,
        num_external_blocks=num_external_blocks,
    )


def make_scheduler(
    *,
    num_kv_cache_blocks: int = 65,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    eos_token_ids: frozenset[int] = frozenset({EOS_TOKEN_ID}),
    check_invariants: bool = True,
    has_kv_connector: bool = False,
    **options: Any,
) -> Scheduler:
    """A small scheduler that checks itself. options: fields of SchedulerConfig (8 requests, 64 tokens a step, 256 a request)."""
    return Scheduler(
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, **options}),
        cache=CacheConfig(
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            prefix_caching_seed="test",
            has_kv_connector=has_kv_connector,
        ),
        num_kv_cache_blocks=num_kv_cache_blocks,
        eos_token_ids=eos_token_ids,
        check_invariants=check_invariants,
    )
