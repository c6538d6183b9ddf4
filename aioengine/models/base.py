"""What every model offers to the worker."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from aioengine.attention.base import AttentionBackend, AttentionBatch
from aioengine.checkpoint.lora import LoraAdapter
from aioengine.checkpoint.stored_tensor import StoredTensor
from aioengine.distributed.group import Group
from aioengine.errors import ConfigError
from aioengine.models.config import DecoderConfig
from aioengine.models.lora import AdapterRun


class CausalLM(nn.Module):
    """A decoder over a flat step of tokens. It knows positions and caches, never requests or the scheduler.

    A family subclasses this, names how fused parameters are made of checkpoint tensors, and reads its `config.json`.
    """

    # Fused parameter -> the checkpoint's names of its parts, in row order.
    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    num_layers: int
    layer_groups: tuple[int, ...]  # the number of each layer's KV-cache group, as in `kv_cache_groups.group_layers` of its windows
    default_eos_token_id: ClassVar[int | None] = None  # what the family's config class assumes where nothing states one
    runs_own_threads: bool = False  # the products do not run on PyTorch's threads
    supports_graphs: ClassVar[bool] = True  # `forward` reads nothing back from the device: it can be captured

    @classmethod
    @abstractmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """The family's reading of config.json. Raises ModelError naming a key that is missing or unsupported."""

    @classmethod
    @abstractmethod
    def build(cls, config: DecoderConfig, *, attention_backend: AttentionBackend, dtype: torch.dtype, device: torch.device) -> CausalLM:
        """The model with uninitialised weights."""

    def join(self, group: Group) -> None:
        """Run as one of these ranks: the model was built for a rank's config and gets a rank's tensors (`models.tensor_parallel`).

        Raises ConfigError if the family cannot.
        """
        if group.size > 1:
            raise ConfigError(f"{type(self).__name__} runs in one piece: tensor_parallel_size must be 1, got {group.size}")

    @abstractmethod
    def load_weights(self, tensors: Iterable[StoredTensor]) -> None:
        """Fill every parameter. Raises ModelError for a tensor that is missing, unknown or of another shape."""

    def load_adapter(self, name: str, adapter: LoraAdapter) -> None:
        """Rows of a step may have it from now on. Raises ModelError if it does not fit, ConfigError if the family takes none."""
        raise ConfigError(f"LoRA adapters are for families with a class of their own, not for {type(self).__name__}: {name!r} is refused")

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter that `load_adapter` took."""
        raise ConfigError(f"{type(self).__name__} has no LoRA adapter {name!r}")

    def verify(self) -> None:
        """Once, after `load_weights`: see that the model computes what it should. Raises ModelError if it does not."""

    @abstractmethod
    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        *,
        kv_caches: list[torch.Tensor],  # one a layer, in the backend's layout; layers at the same place of different groups share one
        attention_metadata: tuple[AttentionBatch, ...],  # one a KV-cache group
        adapters: Sequence[AdapterRun] = (),  # the rows that have one of `load_adapter`
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        """One step. Writes the step's keys and values to the caches."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] -> [n, vocab_size] float32."""

    def greedy_tokens(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """hidden [n, hidden_size] -> [n] int64: the arg-max of each row of `compute_logits`, the first of equal logits.

        None if `compute_logits` has to say: where nothing is faster, and where a logit is not finite.
        """
        return None
