"""Gemma 3, text only: norms around attention and MLP, most layers with a window and angles of their own, scaled embeddings.

As transformers' `Gemma3TextConfig` reads it. Where a config.json states soft caps, which no Gemma 3 has, it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from aioengine.errors import ModelError
from aioengine.layers.rope import RopeConfig
from aioengine.models.config import DecoderConfig, decoder_config, flag, layer_windows, number, positive, rope_config, window
from aioengine.models.decoder import DecoderForCausalLM

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
    }
)
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
# The base of the wavelengths: the key beside the rotary settings, and what it is where nothing is stated.
_THETAS: Mapping[str, tuple[str, float]] = MappingProxyType(
    {_GLOBAL: ("rope_theta", 1_000_000.0), _LOCAL: ("rope_local_base_freq", 10_000.0)}
)
_PATTERN = 6  # every sixth layer sees everything


class Gemma3ForCausalLM(DecoderForCausalLM):
    default_eos_token_id: ClassVar[int | None] = 1

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        _refuse(raw)
        fields = {**DEFAULTS, **raw}
        ropes = {kind: _rope(fields, kind) for kind in (_GLOBAL, _LOCAL)}
        kinds = _layer_kinds(fields)
        bias = flag(raw, "attention_bias")
        # Rotary settings are read above, and the activation has another name.
        plain = {key: value for key, value in raw.items() if key not in ("rope_scaling", "rope_parameters", "rope_theta", "hidden_act")}
        return decoder_config(
            {**plain, "hidden_act": raw.get("hidden_activation", "gelu_pytorch_tanh")},
            defaults=DEFAULTS,
            windows=layer_windows(fields, size=window(fields), otherwise=[kind == _LOCAL for kind in kinds]),
            scaled_positions=False,  # max_position_embeddings is the length after scaling
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            layer_ropes=tuple(ropes[kind] for kind in kinds),
            attention_scale=number(raw, "query_pre_attn_scalar", default=256.0) ** -0.5,
            embedding_scale=positive(fields, "hidden_size") ** 0.5,
            sandwich_norms=True,
            norms_from_one=True,
        )


def _refuse(raw: Mapping[str, Any]) -> None:
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if raw.get(key) is not None:
            raise ModelError(f"config.json: {key} must be null, got {raw[key]!r:.200}: Gemma 3 has no soft caps")
    if raw.get("use_bidirectional_attention"):
        raise ModelError("config.json: use_bidirectional_attention is true: only models whose tokens see what is before them are supported")


def _layer_kinds(fields: Mapping[str, Any]) -> list[str]:
    """The kind of each layer: `layer_types`, else every `sliding_window_pattern`-th sees everything."""
    stated, num_layers = fields.get("layer_types"), positive(fields, "num_hidden_layers")
    if isinstance(stated, list) and len(stated) == num_layers:  # layer_windows() refuses others, and unknown kinds
        return [_LOCAL if kind == _LOCAL else _GLOBAL for kind in stated]
    pattern = fields.get("sliding_window_pattern", _PATTERN)
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        raise ModelError(f"config.json: sliding_window_pattern must be a positive integer, got {pattern!r:.200}")
    return [_LOCAL if (layer + 1) % pattern else _GLOBAL for layer in range(num_layers)]


def _rope(fields: Mapping[str, Any], kind: str) -> RopeConfig:
    """The rotary settings of one kind of layer. `rope_scaling`, of files before transformers 5, is that of the global ones."""
    by_kind = fields.get("rope_parameters")
    if by_kind is not None and (not isinstance(by_kind, Mapping) or not set(by_kind) <= {_GLOBAL, _LOCAL}):
        raise ModelError(f"config.json: rope_parameters must have settings for {_GLOBAL} and {_LOCAL}, got {by_kind!r:.200}")
    stated = (by_kind or {}).get(kind) or {}
    if not isinstance(stated, Mapping):
        raise ModelError(f"config.json: rope_parameters: {kind} must be an object, got {stated!r:.200}")
    scaling = fields.get("rope_scaling") if kind == _GLOBAL else None
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ModelError(f"config.json: rope_scaling must be an object, got {scaling!r:.200}")
    key, default = _THETAS[kind]
    theta = fields.get(key)
    settings = {"rope_theta": default if theta is None else theta, **stated, **(scaling or {})}
    head_dim = positive(fields, "head_dim")
    return rope_config({"rope_parameters": settings}, max_positions=positive(fields, "max_position_embeddings"), head_dim=head_dim)
