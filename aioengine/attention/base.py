"""What an attention backend is: a way to write this step's keys and values into paged memory and attend over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from aioengine_kernels.flash_decoding import DecodeSplit

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """What every attention layer of a model shares."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    logits_soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One ragged step of the layers of a KV-cache group: request i owns the query rows query_start_loc[i] : query_start_loc[i+1].

    `seq_lens[i]` counts the cached positions *including* this step's own tokens, so the query rows of request i stand at
    positions seq_lens[i] - query_len .. seq_lens[i] - 1. Arrays ending in `_np` are the host's mirrors.

    A backend's `build_metadata` may add what it works out once for all layers, as a subclass of its own.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    query_start_loc_np: IntArray  # [num_reqs + 1]
    seq_lens: torch.Tensor  # [num_reqs] int32
    seq_lens_np: IntArray  # [num_reqs]
    # [num_reqs, max_num_blocks_per_req] int32; entries past a request's blocks, and of blocks behind the window, are undefined
    block_table: torch.Tensor
    slot_mapping: torch.Tensor  # [num_tokens] int64: block_id * block_size + offset of each new token
    sliding_window: int | None = None  # a query sees the last `sliding_window` positions, its own included; None: all
    # Where decodes come first, so that they can be attended for in a launch of their own:
    num_decodes: int = 0  # so many requests, from the first on, have one query token
    split: DecodeSplit | None = None  # how their cached positions are shared out; None: the backend finds a way
    max_chunk_seq_len: int = 0  # of the requests behind them; 0: there are none, or they were not told apart


@dataclass(frozen=True, slots=True)
class RotationInputs:
    """What a backend that rotates by itself needs of a layer, and of the step."""

    positions: torch.Tensor  # [num_tokens] int64
    cos_sin: torch.Tensor  # [max_positions, head_dim] float32: cosines in the first half, sines in the second
    query_weight: torch.Tensor | None = None  # [head_dim]: RMSNorm of each query head before the rotation; None: none
    key_weight: torch.Tensor | None = None  # [head_dim]
    eps: float = 0.0  # of that norm


class AttentionBackend(ABC):
    """Stateless apart from its configuration; the KV cache and the step's metadata are arguments."""

    name: ClassVar[str]
    supports_graphs: ClassVar[bool] = False  # `forward` reads nothing back from the device and no `_np` array: it can be captured
    fuses_rope: ClassVar[bool] = False  # `forward_qkv` works

    def __init__(self, config: AttentionConfig) -> None:
        self.config = config

    def with_config(self, config: AttentionConfig) -> AttentionBackend:
        """The same backend for another configuration, which it supports."""
        return type(self)(config)

    @classmethod
    @abstractmethod
    def supports(cls, config: AttentionConfig, device: torch.device) -> str | None:
        """None if this backend can serve the configuration, else why not."""

    @abstractmethod
    def allocate_kv_cache(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """The paged cache of one layer, in this backend's layout. Every slot holds finite values."""

    @abstractmethod
    def kv_cache_bytes_per_block(self) -> int:
        """Bytes that one block takes in one layer."""

    @abstractmethod
    def build_metadata(self, batch: AttentionBatch) -> AttentionBatch:
        """The step as `forward` needs it: the batch, with what is computed once and shared by all layers of the group."""

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        *,
        kv_cache: torch.Tensor,
        metadata: AttentionBatch,  # of `build_metadata`
        scale: float,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Write key and value of all tokens to the cache, then attend. In that order: requests of one step may share
        blocks that this very step fills."""

    def forward_qkv(
        self,
        qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values, not rotated
        *,
        rotation: RotationInputs,
        kv_cache: torch.Tensor,
        metadata: AttentionBatch,
        scale: float,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Normalise and rotate queries and keys, then do what `forward` does. Only if `fuses_rope`."""
        raise NotImplementedError(f"the attention backend {self.name!r} takes rotated queries and keys")

    def compile_kernels(  # noqa: B027  # nothing to compile is the rule
        self,
        kv_cache: torch.Tensor,  # of one layer
        batch: AttentionBatch,  # whose block table and window are those of steps: what is compiled depends on the strides and on both
    ) -> None:
        """Launch what the steps of a warm-up do not reach and serving may, over the blocks of the table's first row."""

    @abstractmethod
    def zero_blocks(self, kv_cache: torch.Tensor, block_ids: list[int]) -> None:
        """Clear blocks of one layer's cache."""
