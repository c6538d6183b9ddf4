"""The shape of a decoder, read from the `config.json` that transformers writes.

Read directly rather than through `AutoConfig`, whose import alone takes most of a second at every start. Where a fact can
stand in two places, what counts is what transformers 5 takes (the tests compare with it, the two disagreeing).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from aioengine.checkpoint.quantization import read_quantization
from aioengine.errors import ModelError
from aioengine.kv_cache_groups import group_layers, group_of_layers
from aioengine.layers.activation import find_activation, known_activations
from aioengine.layers.rope import RopeConfig

_DEFAULT_THETA = 10000.0
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
    """What distinguishes one gated, rotary decoder from another."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # the longest sequence: what the key of this name says, and what rotary scaling makes of it
    rms_norm_eps: float
    hidden_act: str
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of the product after attention
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each query and key head, before the rotation
    layer_windows: tuple[int | None, ...] = ()  # of each layer, in tokens, the query's own included; None: it sees everything; (): all None
    layer_ropes: tuple[RopeConfig, ...] = ()  # one for each layer, where they differ; else `rope` is that of all
    attention_scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    embedding_scale: float = 1.0  # factor on embeddings, rounded to their dtype
    sandwich_norms: bool = False  # what attention and the MLP add to the residual is normalised, too
    norms_from_one: bool = False  # norm weights are stored as distances from 1, and kept in float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_windows", tuple(self.layer_windows) or (None,) * self.num_layers)
        assert len(self.layer_windows) == self.num_layers, f"{len(self.layer_windows)} windows, {self.num_layers} layers"

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """The number of each layer's KV-cache group."""
        return group_of_layers(group_layers(self.layer_windows))

    @property
    def rope_of_layers(self) -> tuple[RopeConfig, ...]:
        return self.layer_ropes or (self.rope,) * self.num_layers

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale


def decoder_config(
    raw: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    windows: Sequence[int | None] = (),
    scaled_positions: bool = True,
    **facts: Any,
) -> DecoderConfig:
    """Build a DecoderConfig from `raw`, the content of config.json.

    defaults: what the family's config class assumes for absent keys; null is no absence, and only some keys may be null.
    windows: the sliding window of each layer; one that holds the longest sequence is none, and empty: no layer has one.
    scaled_positions: rotary scaling reaches beyond `max_position_embeddings`. facts: fields that the family derives itself.
    Raises ModelError naming the key that is missing, impossible or not supported.
    """
    refuse_unsupported(raw)
    fields = {**defaults, **raw}
    num_heads, hidden_size = positive(fields, "num_attention_heads"), positive(fields, "hidden_size")
    num_kv_heads = num_heads if fields.get("num_key_value_heads") is None else positive(fields, "num_key_value_heads")
    head_dim = positive({"head_dim": hidden_size // num_heads} if fields.get("head_dim") is None else fields, "head_dim")
    if num_heads % num_kv_heads:
        raise ModelError(f"config.json: num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})")
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim must be even for rotary embeddings, got {head_dim}")
    max_positions = positive(fields, "max_position_embeddings")
    if max_positions * head_dim > _MAX_ROTARY_NUMBERS:
        raise ModelError(
            f"config.json: max_position_embeddings ({max_positions}) times head_dim ({head_dim}) exceeds {_MAX_ROTARY_NUMBERS}, "
            "the limit of the rotary table"
        )
    rope = rope_config(fields, max_positions=max_positions, head_dim=head_dim)
    num_positions = min(_scaled_positions(rope, max_positions), _MAX_ROTARY_NUMBERS // head_dim) if scaled_positions else max_positions
    return DecoderConfig(
        vocab_size=positive(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(fields, "intermediate_size"),
        num_layers=positive(fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=num_positions,
        rms_norm_eps=number(fields, "rms_norm_eps", default=1e-6),
        hidden_act=_activation(fields),
        rope=rope,
        tie_word_embeddings=flag(fields, "tie_word_embeddings"),
        layer_windows=tuple(None if window is None or window >= num_positions else window for window in windows),
        **facts,
    )


def refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Raise ModelError for a model whose weights or whose kind no family here can serve, naming the key and its value."""
    read_quantization(raw)
    if raw.get("is_encoder_decoder"):
        raise ModelError("config.json: is_encoder_decoder is true: only models that are a decoder alone are supported")


def _activation(fields: Mapping[str, Any]) -> str:
    name = _name(fields, "hidden_act", default="silu")
    if find_activation(name) is None:
        raise ModelError(f"config.json: hidden_act {name!r} is not supported; supported: {', '.join(sorted(known_activations()))}")
    return name


def rope_config(fields: Mapping[str, Any], *, max_positions: int, head_dim: int) -> RopeConfig:
    """From `rope_scaling`, or if that is absent or empty from `rope_parameters`, as a whole: so does transformers 5.

    `rope_theta` may stand there or beside it. Raises ModelError for an unknown kind and for a parameter that is missing or
    impossible.
    """
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    parameters = dict(_mapping(fields, key))
    nested = [name for name, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        raise ModelError(f"config.json: {key} differs by the type of layer ({', '.join(nested):.200}); one for all layers is supported")
    kind = str(parameters.pop("rope_type", None) or parameters.get("type") or "default")
    parameters.pop("type", None)
    found = {"rope_theta": parameters.pop("rope_theta", None) or fields.get("rope_theta") or _DEFAULT_THETA}
    theta = number(found, "rope_theta", default=_DEFAULT_THETA)
    if kind not in _ROPE_KINDS:
        raise ModelError(f"config.json: {key}: rope type {kind!r:.200} is not supported; supported: {', '.join(sorted(_ROPE_KINDS))}")
    rotated = parameters.pop("partial_rotary_factor", None) or fields.get("partial_rotary_factor") or 1.0
    if rotated != 1.0:
        raise ModelError(f"config.json: partial_rotary_factor {rotated!r:.200} is not supported; only 1.0 is")
    if kind in ("llama3", "yarn"):
        trained = fields.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
        parameters["original_max_position_embeddings"] = trained or max_positions
    _check_rope_numbers(parameters, kind=kind, theta=theta, head_dim=head_dim)
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(kind, ())
    for name in needed:
        if parameters.get(name) is None:
            raise ModelError(f"config.json: rope type {kind!r} needs a number {name!r}, got None")
    if kind == "yarn" and parameters.get("factor") is None:
        parameters["factor"] = max_positions / parameters["original_max_position_embeddings"]
    return RopeConfig(theta=theta, kind=kind, parameters=parameters)


def _scaled_positions(rope: RopeConfig, max_positions: int) -> int:
    """`max_position_embeddings` is the length before linear scaling, and with YaRN it may be the one before or after."""
    if rope.kind == "linear":
        return max(int(max_positions * rope.parameters["factor"]), max_positions)
    if rope.kind == "yarn":
        return max(int(rope.parameters["original_max_position_embeddings"] * rope.parameters["factor"]), max_positions)
    return max_positions


def contradictions(raw: Mapping[str, Any]) -> Iterator[str]:
    """What a config.json states twice and differently, with what is taken; for people to read."""
    scaling, parameters = raw.get("rope_scaling"), raw.get("rope_parameters")
    if isinstance(scaling, Mapping) and isinstance(parameters, Mapping) and scaling and scaling != parameters:
        if parameters.get("rope_type", "default") != "default":
            yield f"rope_scaling replaces rope_parameters as a whole, which stated {dict(parameters)!r:.200}"
        taken = next((place["rope_theta"] for place in (scaling, raw) if place.get("rope_theta") is not None), _DEFAULT_THETA)
        if parameters.get("rope_theta") not in (None, taken):
            yield (
                f"rope_theta {parameters['rope_theta']!r:.50} stands in rope_parameters, which rope_scaling replaces: it is {taken!r:.50}; "
                "write it into rope_scaling"
            )
    inner = scaling or parameters
    beside, inside = raw.get("rope_theta"), inner.get("rope_theta") if isinstance(inner, Mapping) else None
    if None not in (beside, inside) and beside != inside:
        yield f"rope_theta {beside!r:.50} does not count beside that of the rotary settings, {inside!r:.50}"
    if raw.get("model_type") == "llama" and raw.get("sliding_window") is not None:
        yield f"sliding_window {raw['sliding_window']!r:.50} does not count: Llama has no windows"
    if None not in (raw.get("dtype"), raw.get("torch_dtype")) and str(raw["dtype"]) != str(raw["torch_dtype"]):
        yield f"torch_dtype {raw['torch_dtype']!r:.50} does not count beside dtype {raw['dtype']!r:.50}"


def _check_rope_numbers(parameters: Mapping[str, Any], *, kind: str, theta: float, head_dim: int) -> None:
    for key in _ROPE_NUMBERS:
        value = parameters.get(key)
        if value is not None and not (key.startswith("mscale") and value == 0):  # 0 switches these off
            number(parameters, key, default=1.0)
    if parameters.get("original_max_position_embeddings") is not None:
        positive(parameters, "original_max_position_embeddings")
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
            number({"frequency_factors": factor}, "frequency_factors", default=1.0)


def window(fields: Mapping[str, Any], *, default: int | None = None) -> int | None:
    """`sliding_window` in tokens; null means none, an absent key `default`. Raises ModelError if it is no positive integer."""
    value = fields.get("sliding_window", default)
    return None if value is None else positive({"sliding_window": value}, "sliding_window")


def flag(fields: Mapping[str, Any], key: str) -> bool:
    """A key that is true, false, null or absent; null and absent mean false. Raises ModelError for anything else."""
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config.json: {key} must be true or false, got {value!r:.200}")
    return bool(value)


def qwen_windows(raw: Mapping[str, Any], *, defaults: Mapping[str, Any]) -> list[int | None]:
    """The window of each layer. `layer_types` decides which have one; if it is absent they start at layer `max_window_layers`."""
    fields = {**defaults, **raw}
    size = window(fields, default=4096) if flag(fields, "use_sliding_window") else None
    first = fields.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise ModelError(f"config.json: max_window_layers must be an integer, got {first!r:.200}")
    return layer_windows(fields, size=size, otherwise=[i >= first for i in range(positive(fields, "num_hidden_layers"))])


def mistral_windows(raw: Mapping[str, Any], *, defaults: Mapping[str, Any]) -> list[int | None]:
    """The window of each layer: of all, unless `layer_types` is there. A null window means none; an absent key Mistral 7B's."""
    fields = {**defaults, **raw}
    return layer_windows(fields, size=window(fields), otherwise=[True] * positive(fields, "num_hidden_layers"))


def layer_windows(fields: Mapping[str, Any], *, size: int | None, otherwise: Sequence[bool]) -> list[int | None]:
    """size: of the windowed layers. otherwise: which those are if `layer_types` does not say."""
    kinds = _layer_types(fields)
    if kinds is None:
        return [size if windowed else None for windowed in otherwise]
    if len(kinds) != len(otherwise):
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries, num_hidden_layers is {len(otherwise)}")
    if "sliding_attention" in kinds and size is None:
        switch = f"use_sliding_window is {fields['use_sliding_window']!r:.50}, " if "use_sliding_window" in fields else ""
        raise ModelError(
            'config.json: layer_types has "sliding_attention", but there is no window: '
            f"{switch}sliding_window is {fields.get('sliding_window')!r:.50}"
        )
    return [size if kind == "sliding_attention" else None for kind in kinds]


def _layer_types(fields: Mapping[str, Any]) -> list[str] | None:
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ModelError(f"config.json: layer_types must be a list of names, got {kinds!r:.200}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention", "attention"})
    if unknown:
        raise ModelError(f"config.json: layer_types {', '.join(unknown):.200} is not supported; full_attention and sliding_attention are")
    return ["full_attention" if kind == "attention" else kind for kind in kinds]  # its name of old


def positive(fields: Mapping[str, Any], key: str) -> int:
    """A positive integer within `_LIMITS`."""
    value, limit = fields.get(key), _LIMITS[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value!r:.200}")
    if value > limit:
        raise ModelError(f"config.json: {key} must be at most {limit}, got {value}")
    return value


def number(fields: Mapping[str, Any], key: str, *, default: float) -> float:
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
