"""What stands in for attention in transformers' code: our paged backend in a step, and a listener before the first one.

transformers looks up the function by the name in `config._attn_implementation`. What a step needs comes with the call, as a keyword
argument that the model's code hands down to each of its layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from aioengine.attention.base import AttentionBackend, AttentionBatch
from aioengine.errors import ModelError

SERVING, LISTENING = "aioengine", "aioengine_listening"  # implementations of attention, as transformers names them
STEP = "aioengine_step"  # the keyword argument
Groups = tuple[AttentionBatch, ...]  # a step's metadata, one a KV-cache group
# Arguments that say nothing of what attention computes, or that are read here.
_KNOWN = frozenset(
    {
        *("dropout", "position_ids", "cache_position", "use_cache", "past_key_values", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "num_items_in_batch", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
        *("is_causal", "return_dict", "deterministic", "logits_to_keep", "input_ids", "inputs_embeds", STEP),
    }
)


def register() -> None:
    """Make both functions known to transformers. The listener gets what the model's code would mask; a step gets no masks."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(SERVING, attend)
    AttentionInterface.register(LISTENING, listen)
    AttentionMaskInterface.register(LISTENING, mask_rule)


class PagedStep:
    """One step of the model: its caches, and the metadata of each KV-cache group."""

    def __init__(self, backends: CappedBackends, layer_groups: Sequence[int], *, kv_caches: list[torch.Tensor], metadata: Groups) -> None:
        self.head_dim = backends.main.config.head_dim
        self._backends = backends
        self._layer_groups = layer_groups
        self._kv_caches = kv_caches
        self._metadata = metadata

    def forward(
        self,
        layer: int,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        *,
        scale: float,
        soft_cap: float | None,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        backend, metadata = self._backends.find(soft_cap), self._metadata[self._layer_groups[layer]]
        return backend.forward(query, key, value, kv_cache=self._kv_caches[layer], metadata=metadata, scale=scale)


class CappedBackends:
    """The backend of a model, and its like for layers that cap their scores: they hold nothing but their configuration."""

    def __init__(self, main: AttentionBackend, *, device: torch.device) -> None:
        self.main = main
        self._device = device
        self._made: dict[float | None, AttentionBackend] = {main.config.logits_soft_cap: main}

    def find(self, soft_cap: float | None) -> AttentionBackend:
        """Raises ModelError if the backend has no such attention."""
        if soft_cap not in self._made:
            config = dataclasses.replace(self.main.config, logits_soft_cap=soft_cap)
            if (reason := type(self.main).supports(config, self._device)) is not None:
                raise ModelError(f"the attention backend {self.main.name} cannot cap scores at {soft_cap}: {reason}")
            self._made[soft_cap] = self.main.with_config(config)
        return self._made[soft_cap]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, key_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:  # [1, num_tokens, num_heads, value_dim]
    """Attention in a step, by its paged backend."""
    step: PagedStep = others[STEP]
    size, value_dim = step.head_dim, value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    rows = (_rows(tensor, size) for tensor in (query, key, value))
    out = step.forward(module.layer_idx, *rows, scale=scale, soft_cap=softcap)  # type: ignore[arg-type]
    return (out if value_dim == size else out[..., :value_dim].contiguous())[None], None


def _rows(heads: torch.Tensor, size: int) -> torch.Tensor:
    """[1, num_heads, num_tokens, dim] -> [num_tokens, num_heads, size]. Zeros behind a head change no product of two heads."""
    rows = heads[0].transpose(0, 1)
    return (rows if rows.shape[-1] == size else F.pad(rows, (0, size - rows.shape[-1]))).contiguous()


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """How a layer attends, as its code says it."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    soft_cap: float | None
    window: int | None  # as an argument
    rule: MaskRule | None  # as the mask has it


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Which positions a query sees, as the model's code would mask them."""

    sees: Callable[[int, int], bool]  # (query position, key position)


@dataclass(slots=True)
class Listener:
    """Collects what each layer hands to attention."""

    layers: dict[int, LayerFacts] = field(default_factory=dict)


def mask_rule(*, mask_function: Callable[..., Any], **_: Any) -> MaskRule:
    """In place of a mask."""

    def sees(query: int, key: int) -> bool:
        zero = torch.tensor(0)
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    return MaskRule(sees)


def listen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Note what a layer wants; the answer is zeros. Raises ModelError for what `attend` does not compute."""
    listener = others.get(STEP)
    if not isinstance(listener, Listener):
        raise ModelError("its code does not hand arguments of a call down to attention")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelError(f"{type(module).__name__} does not say which layer it is (layer_idx is {layer!r:.50})")
    if layer in listener.layers:
        raise ModelError(f"layer {layer} attends more than once a step")
    _refuse_others(module, others)
    if attention_mask is not None and not isinstance(attention_mask, MaskRule):
        raise ModelError(f"layer {layer} has a mask of its own ({type(attention_mask).__name__})")
    listener.layers[layer] = LayerFacts(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_dim=query.shape[-1],
        value_dim=value.shape[-1],
        soft_cap=softcap,
        window=sliding_window,
        rule=attention_mask,
    )
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _refuse_others(module: torch.nn.Module, others: Mapping[str, Any]) -> None:
    if others.get("s_aux") is not None or others.get("sinks") is not None:
        raise ModelError("its attention has sinks, which the paged attention does not compute")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError("its attention is not causal")
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _KNOWN)
    if unknown:
        raise ModelError(f"its attention takes {', '.join(unknown):.200}, which the paged attention does not know")
