"""The shape of a decoder, read from the `config.json` that transformers writes.

Read directly rather than through `AutoConfig`, whose import alone takes most of a second at every start. The fields are
the same in every release of transformers except the rotary ones, which moved into `rope_parameters` in version 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from aioengine.errors import ModelError
from aioengine.layers.rope import RopeConfig

_ROPE_KINDS = frozenset({"default", "linear", "llama3", "yarn", "dynamic"})
# Several times what the largest models have: more is damage, and would be taken for real when memory is allocated.
_LIMITS: Mapping[str, int] = MappingProxyType(
    {
        "vocab_size": 1 << 22,
        "hidden_size": 1 << 18,
        "intermediate_size": 1 << 20,
        "num_hidden_layers": 1 << 12,
        "num_attention_heads": 1 << 12,
        "num_key_value_heads": 1 << 12,
        "head_dim": 1 << 12,
        "max_position_embeddings": 1 << 24,
        "sliding_window": 1 << 24,
        "original_max_position_embeddings": 1 << 24,
        "max_window_layers": 1 << 12,
    }
)
_MAX_ROTARY_NUMBERS = 1 << 28  # of the table of angles, [max_position_embeddings, head_dim] float32: 1 GiB
_LARGEST = 1e18
_MAX_NAME_LENGTH = 100
# Numbers of `rope_parameters` that are divisors, lengths or arguments of logarithms, so that nothing else makes sense.
_ROPE_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "magnitude",
)


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
    if max_positions * head_dim > _MAX_ROTARY_NUMBERS:
        raise ModelError(
            f"config.json: max_position_embeddings ({max_positions}) times head_dim ({head_dim}) exceeds {_MAX_ROTARY_NUMBERS}, "
            "the limit of the rotary table"
        )
    return DecoderConfig(
        vocab_size=_positive(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(fields, "intermediate_size"),
        num_layers=_positive(fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=_number(fields, "rms_norm_eps", default=1e-6),
        hidden_act=_name(fields, "hidden_act", default="silu"),
        rope=rope_config(fields, max_positions=max_positions, head_dim=head_dim),
        tie_word_embeddings=flag(fields, "tie_word_embeddings"),
        **facts,
    )


def rope_config(fields: Mapping[str, Any], *, max_positions: int, head_dim: int) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Raises ModelError for an unknown kind and for a parameter that is missing or impossible.
    """
    parameters = {**_mapping(fields, "rope_scaling"), **_mapping(fields, "rope_parameters")}
    kind = str(parameters.pop("rope_type", None) or parameters.pop("type", None) or "default")
    parameters.pop("type", None)
    found = {"rope_theta": parameters.pop("rope_theta", None) or fields.get("rope_theta") or 10000.0}
    theta = _number(found, "rope_theta", default=10000.0)
    if kind not in _ROPE_KINDS:
        raise ModelError(f"config.json: rope type {kind!r:.200} is not supported; supported: {', '.join(sorted(_ROPE_KINDS))}")
    rotated = parameters.pop("partial_rotary_factor", None) or fields.get("partial_rotary_factor") or 1.0
    if rotated != 1.0:
        raise ModelError(f"config.json: partial_rotary_factor {rotated} is not supported; only 1.0 is")
    if kind in ("llama3", "yarn"):
        trained = fields.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
        parameters["original_max_position_embeddings"] = trained or max_positions
    _check_rope_numbers(parameters, kind=kind, theta=theta, head_dim=head_dim)
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(kind, ())
    for key in needed:
        if parameters.get(key) is None:
            raise ModelError(f"config.json: rope type {kind!r} needs a number {key!r}, got None")
    return RopeConfig(theta=theta, kind=kind, parameters=parameters)


def _check_rope_numbers(parameters: Mapping[str, Any], *, kind: str, theta: float, head_dim: int) -> None:
    for key in _ROPE_NUMBERS:
        value = parameters.get(key)
        if value is not None and not (key.startswith("mscale") and value == 0):  # 0 switches these off
            _number(parameters, key, default=1.0)
    if parameters.get("original_max_position_embeddings") is not None:
        _positive(parameters, "original_max_position_embeddings")
    if kind == "yarn" and theta <= 1.0:
        raise ModelError(f"config.json: rope type 'yarn' needs rope_theta > 1, got {theta}")
    low, high = parameters.get("low_freq_factor"), parameters.get("high_freq_factor")
    if kind == "llama3" and low is not None and high is not None and low >= high:
        raise ModelError(f"config.json: low_freq_factor ({low}) must be below high_freq_factor ({high})")
    factors = parameters.get("frequency_factors")
    if factors is not None:
        if not isinstance(factors, list) or len(factors) != head_dim // 2:
            raise ModelError(f"config.json: frequency_factors must be {head_dim // 2} numbers, half of head_dim, got {factors!r:.200}")
        for factor in factors:
            _number({"frequency_factors": factor}, "frequency_factors", default=1.0)


def window(fields: Mapping[str, Any], *, default: int | None = None) -> int | None:
    """`sliding_window` in tokens; null means none, an absent key `default`. Raises ModelError if it is no positive integer."""
    value = fields.get("sliding_window", default)
    return None if value is None else _positive({"sliding_window": value}, "sliding_window")


def flag(fields: Mapping[str, Any], key: str) -> bool:
    """A key that is true, false, null or absent; null and absent mean false. Raises ModelError for anything else."""
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config.json: {key} must be true or false, got {value!r:.200}")
    return bool(value)


def qwen_sliding_window(fields: Mapping[str, Any]) -> int | None:
    """Qwen's windows start at layer `max_window_layers`; only "all layers" or "none" can be served with one KV layout."""
    size = window(fields)
    if not flag(fields, "use_sliding_window") or size is None:
        return None
    num_layers, first = _positive(fields, "num_hidden_layers"), fields.get("max_window_layers", 28)
    if first != 0:  # 0 is "all layers"
        first = _positive({"max_window_layers": first}, "max_window_layers")
    kinds = _layer_types(fields) or {"sliding_attention" if i >= first else "full_attention" for i in range(num_layers)}
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise ModelError(f"config.json: layers of different attention types ({', '.join(sorted(kinds))}) are not supported")
    return size


def _layer_types(fields: Mapping[str, Any]) -> set[str]:
    kinds = fields.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ModelError(f"config.json: layer_types must be a list of names, got {kinds!r:.200}")
    return set(kinds)


def _positive(fields: Mapping[str, Any], key: str) -> int:
    """A positive integer within `_LIMITS`."""
    value, limit = fields.get(key), _LIMITS[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value!r:.200}")
    if value > limit:
        raise ModelError(f"config.json: {key} must be at most {limit}, got {value}")
    return value


def _number(fields: Mapping[str, Any], key: str, *, default: float) -> float:
    """A finite number above 0. (A bool is none, and neither is an integer that no float can hold.)"""
    value = fields.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < _LARGEST or math.isnan(value):
        raise ModelError(f"config.json: {key} must be a number above 0 and below {_LARGEST:g}, got {value!r:.200}")
    return float(value)


def _name(fields: Mapping[str, Any], key: str, *, default: str) -> str:
    value = fields.get(key, default)
    if not isinstance(value, str) or len(value) > _MAX_NAME_LENGTH:
        raise ModelError(f"config.json: {key} must be a name of at most {_MAX_NAME_LENGTH} letters, got {value!r:.200}")
    return value


def _mapping(fields: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = fields.get(key) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json: {key} must be an object, got {value!r:.200}")
    return value
