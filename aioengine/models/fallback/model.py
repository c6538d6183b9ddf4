"""The model that the worker runs: transformers' code, with attention over our paged cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from aioengine.attention.base import AttentionBackend, AttentionBatch
from aioengine.attention.cpu_paged import CpuPagedBackend
from aioengine.checkpoint.stored_tensor import StoredTensor
from aioengine.models.base import CausalLM
from aioengine.models.config import DecoderConfig
from aioengine.models.fallback.attention import STEP, CappedBackends, PagedStep
from aioengine.models.fallback.config import TransformersConfig, read_transformers_config
from aioengine.models.fallback.packed import Products
from aioengine.models.lora import AdapterRun
from aioengine.printable import get_logger
from aioengine_kernels.cpu import load_kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = get_logger(__name__)


class TransformersForCausalLM(CausalLM):
    """Serves every architecture that has no class of its own here, if a dry run at load agrees with transformers' own attention.

    Slower than a native family: its products run on PyTorch's kernels, tensors are copied on their way to the cache.
    """

    supports_graphs: ClassVar[bool] = False  # nobody has checked that transformers' code of a model reads nothing back

    def __init__(
        self,
        config: TransformersConfig,
        *,
        attention_backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        products: Products | None = None,  # where some of the weights stay packed
    ) -> None:
        super().__init__()
        self.runs_own_threads = products is not None
        self._products = products
        self.config = config
        self.num_layers = config.num_layers
        self._dtype = dtype
        self._device = device
        self.layer_groups = config.layer_groups
        self._backends = CappedBackends(attention_backend, device=device)
        self._body: nn.Module | None = None  # embedding, layers and norm
        self._head: PreTrainedModel | None = None  # the causal model whose body is replaced by `_GivenHiddenStates`

    @classmethod
    def build_packed(cls, config: DecoderConfig, *, attention_backend: AttentionBackend, fast: bool) -> CausalLM:
        """For a configuration that `packed.why_not_packed` has nothing against. fast: as in `NativeDecoderForCausalLM`."""
        # Made now: they take over the number of PyTorch's threads.
        assert isinstance(config, TransformersConfig)
        kernels = attention_backend.kernels if isinstance(attention_backend, CpuPagedBackend) else load_kernels()
        products = Products(kernels, fast=fast)
        cpu = torch.device("cpu")
        return cls(config, attention_backend=attention_backend, dtype=torch.float32, device=cpu, products=products)

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        return read_transformers_config(raw)

    @classmethod
    def build(cls, config: DecoderConfig, *, attention_backend: AttentionBackend, dtype: torch.dtype, device: torch.device) -> CausalLM:
        assert isinstance(config, TransformersConfig)
        return cls(config, attention_backend=attention_backend, dtype=dtype, device=device)

    def load_weights(self, tensors: Iterable[StoredTensor]) -> None:
        from aioengine.models.fallback.weights import load_transformers_model

        self._head = load_transformers_model(self.config, list(tensors), dtype=self._dtype, device=self._device, products=self._products)

    @torch.inference_mode()
    def verify(self) -> None:
        from aioengine.models.fallback.proof import Proof

        whole = self._head
        assert whole is not None, "load_weights() comes first"
        proof, fast = Proof(whole, self.config, device=self._device), False
        if self._products is not None:  # rounding to 8 bits would make much of small differences
            fast, self._products.fast = self._products.fast, False
        proof.check_layers()
        expected = proof.reference()
        self._split(whole)
        main = self._backends.main
        # In the model's dtype: a narrower cache is the user's choice and proves nothing of the model.
        exact = main.with_config(replace(main.config, kv_cache_dtype=main.config.dtype))
        self._backends = CappedBackends(exact, device=self._device)
        difference = proof.compare(self, exact, expected)
        if self._products is not None:
            self._products.fast = fast
        self._backends = CappedBackends(main, device=self._device)
        logger.warning(
            "%s runs on transformers' own code%s, which is slower than a family with a class of its own; in a dry run its logits agree "
            "with transformers' eager attention to %.1e of their range",
            self.config.class_name,
            "" if self._products is None else ", its products on the native kernels",
            difference,
        )

    def _split(self, whole: PreTrainedModel) -> None:
        """Body and head run apart: only a few rows of a step are scored. The head's own code applies caps and scales."""
        self._body = getattr(whole, whole.base_model_prefix)
        setattr(whole, whole.base_model_prefix, _GivenHiddenStates())

    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        *,
        kv_caches: list[torch.Tensor],
        attention_metadata: tuple[AttentionBatch, ...],
        adapters: Sequence[AdapterRun] = (),  # always empty: none can be loaded
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        assert self._body is not None, "verify() comes first"
        step = PagedStep(self._backends, self.layer_groups, kv_caches=kv_caches, metadata=attention_metadata)
        output = self._body(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **{STEP: step})
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "load_weights() comes first"
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()


class _GivenHiddenStates(nn.Module):
    """In the place of a model's body: the hidden states come with the call."""

    def forward(self, input_ids: None = None, *, inputs_embeds: torch.Tensor, **_: Any) -> _BodyOutput:
        return _BodyOutput(inputs_embeds)

    @property
    def decoder(self) -> _GivenHiddenStates:
        """Some causal models call a part of their body (OPT's)."""
        return self


class _BodyOutput:
    """The output of a body as transformers' heads read it, by name or as a tuple: hidden states, and nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, key: object) -> Any:
        return self.last_hidden_state if key == 0 else () if isinstance(key, slice) else None
