"""The shape of a decoder, read from the `config.json` that transformers writes.

Read directly rather than through `AutoConfig`, whose import alone takes most of a second at every start. The fields are
the same in every release of transformers except the rotary ones, which moved into `rope_parameters` in version 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aioengine.errors import ModelError
from aioengine.layers.rope import RopeConfig

_ROPE_KINDS = frozenset({"default", "linear", "llama3", "yarn", "dynamic"})


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What distinguishes one pre-norm, gated, rotary decoder from another."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of the product after attention
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each query and key head, before the rotation
    sliding_window: int | None = None


def decoder_config(raw: Mapping[str, Any], *, defaults: Mapping[str, Any], **facts: Any) -> DecoderConfig:
    """Build a DecoderConfig from `raw`, the content of config.json.

    defaults: what the family's config class assumes for absent keys. facts: fields that the family derives itself.
    Raises ModelError naming the key that is missing or impossible.
    """
    fields = {**defaults, **{key: value for key, value in raw.items() if value is not None}}
    num_heads = _positive(fields, "num_attention_heads")
    hidden_size = _positive(fields, "hidden_size")
    fields.setdefault("num_key_value_heads", num_heads)
    fields.setdefault("head_dim", hidden_size // num_heads)
    num_kv_heads, head_dim = _positive(fields, "num_key_value_heads"), _positive(fields, "head_dim")
    if num_heads % num_kv_heads:
        raise ModelError(f"config.json: num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})")
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim must be even for rotary embeddings, got {head_dim}")
    max_positions = _positive(fields, "max_position_embeddings")
    return DecoderConfig(
        vocab_size=_positive(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(fields, "intermediate_size"),
        num_layers=_positive(fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        hidden_act=str(fields.get("hidden_act", "silu")),
        rope=rope_config(fields, max_positions=max_positions),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        **facts,
    )


def rope_config(fields: Mapping[str, Any], *, max_positions: int) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before). Raises ModelError for an unknown kind."""
    parameters = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    kind = str(parameters.pop("rope_type", None) or parameters.pop("type", None) or "default")
    parameters.pop("type", None)
    theta = float(parameters.pop("rope_theta", None) or fields.get("rope_theta") or 10000.0)
    if kind not in _ROPE_KINDS:
        raise ModelError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(sorted(_ROPE_KINDS))}")
    rotated = parameters.pop("partial_rotary_factor", None) or fields.get("partial_rotary_factor") or 1.0
    if rotated != 1.0:
        raise ModelError(f"config.json: partial_rotary_factor {rotated} is not supported; only 1.0 is")
    if kind in ("llama3", "yarn"):
        trained = fields.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
        parameters["original_max_position_embeddings"] = trained or max_positions
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(kind, ())
    for key in needed:
        if not isinstance(parameters.get(key), int | float):
            raise ModelError(f"config.json: rope type {kind!r} needs a number {key!r}, got {parameters.get(key)!r}")
    return RopeConfig(theta=theta, kind=kind, parameters=parameters)


def qwen_sliding_window(fields: Mapping[str, Any]) -> int | None:
    """Qwen's windows start at layer `max_window_layers`; only "all layers" or "none" can be served with one KV layout."""
    window = fields.get("sliding_window")
    if not fields.get("use_sliding_window") or window is None:
        return None
    num_layers, first = int(fields["num_hidden_layers"]), int(fields.get("max_window_layers", 28))
    kinds = set(fields.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)])
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise ModelError(f"config.json: layers of different attention types ({', '.join(sorted(kinds))}) are not supported")
    return int(window)


def _positive(fields: Mapping[str, Any], key: str) -> int:
    value = fields.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value
