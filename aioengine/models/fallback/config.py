"""What a config.json says of a decoder that runs on transformers' own code, and which of them cannot run so.

Read through transformers' own config classes, whose defaults count. No code of a repository is ever run: the class is
transformers' own for the `model_type`, and keys that choose code or kernels are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from aioengine.errors import ModelError
from aioengine.layers.rope import RopeConfig
from aioengine.models.config import DecoderConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Of a config.json: what would choose other code, kernels or weights than those that are loaded here.
_LEFT_OUT = frozenset(
    {
        *("auto_map", "custom_pipelines", "trust_remote_code", "fusion_config", "transformers_weights"),
        *("quantization_config", "compression_config"),
        *("attn_implementation", "experts_implementation", "name_or_path", "transformers_version"),
    }
)
_KINDS = frozenset({"full_attention", "sliding_attention", "attention"})
# What no dry run of a few tokens would show, or only after gigabytes were fetched; by `model_type`.
_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "gpt_oss": "its attention has sinks, which the paged attention does not compute",
        "bloom": "its attention has ALiBi biases, which the paged attention does not compute",
        "mpt": "its attention has ALiBi biases, which the paged attention does not compute",
    }
)
# Keys of attention that leaves positions out by other rules than a window: a short dry run would not show it.
_SPARSE = ("index_topk", "attention_chunk_size", "sparse_config", "sparse_attention_config", "num_kv_shared_layers", "use_hybrid_attention")
_MAX_COUNT = 1 << 24


@dataclass(frozen=True, slots=True)
class TransformersConfig(DecoderConfig):
    """A DecoderConfig whose model is transformers'. The norm, the activation and the rotation are its own: nobody reads those fields."""

    raw: Mapping[str, Any] = field(default_factory=dict)
    class_name: str = ""  # of the model, in transformers


def read_transformers_config(raw: Mapping[str, Any]) -> TransformersConfig:
    """The geometry that the KV cache needs. Raises ModelError, naming the architecture, for what cannot be served."""
    model_class, config = find_class(raw), make_config(raw)
    name = model_class.__name__
    try:
        _refuse(model_class, config)
        num_heads, num_kv_heads, head_dim = _heads(config)
        num_layers, max_positions = _count(config, "num_hidden_layers"), _longest(config)
        return TransformersConfig(
            vocab_size=_count(config, "vocab_size"),
            hidden_size=_count(config, "hidden_size"),
            intermediate_size=4 * config.hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=1e-6,
            hidden_act="silu",
            rope=RopeConfig(theta=10000.0),
            raw=raw,
            class_name=name,
            layer_windows=tuple(_windows(config, num_layers, max_positions)),
        )
    except Exception as error:  # config objects raise errors of their own for what differs between layers
        reason = str(error) if isinstance(error, ModelError) else _one_line(error)
        raise ModelError(f"architecture {name!r} is not supported by transformers' own code over a paged cache: {reason}") from error


def find_class(raw: Mapping[str, Any]) -> type[PreTrainedModel]:
    """transformers' decoder for the `model_type`. Raises ModelError if there is none, or if `architectures` names another class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind, names = raw.get("model_type"), raw.get("architectures")
    stated = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ModelError(
            f"architecture {stated!r:.200} (model_type {kind!r:.100}) is not supported: it has no class here, and transformers has none"
        )
    try:
        decoders: Any = MODEL_FOR_CAUSAL_LM_MAPPING
        model_class: type[PreTrainedModel] | None = decoders.get(CONFIG_MAPPING[kind], None)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"architecture {stated!r:.200} is not supported: transformers cannot import it: {error}") from error
    if model_class is None:
        raise ModelError(f"architecture {stated or kind!r:.200} is not supported: transformers has no decoder of model_type {kind!r:.100}")
    if stated is not None and stated != model_class.__name__:
        raise ModelError(
            f"architecture {stated!r:.200} is not supported: the decoder of model_type {kind!r:.100} is {model_class.__name__}"
        )
    return model_class


def make_config(raw: Mapping[str, Any]) -> PreTrainedConfig:
    """transformers' config object. Raises ModelError for what its class refuses."""
    from transformers import AutoConfig

    kept = {key: value for key, value in raw.items() if key not in _LEFT_OUT and not key.startswith("_")}
    try:
        config: PreTrainedConfig = AutoConfig.for_model(kept.pop("model_type"), **kept)
    except Exception as error:  # each config class has checks of its own
        raise ModelError(f"config.json: {_one_line(error)}") from error
    return config


def _refuse(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    if reason := _REASONS.get(config.model_type):
        raise ModelError(reason)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError("it is an encoder and a decoder; only models that are a decoder alone can run")
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", True) is False:
        raise ModelError("config.json: is_decoder is false: it is an encoder")
    if getattr(config, "alibi", False):
        raise ModelError("config.json: alibi is true: ALiBi biases are not computed by the paged attention")
    if getattr(model_class, "_is_stateful", False):
        raise ModelError("it keeps a state other than keys and values, which the paged cache has no place for")
    kinds = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()} - _KINDS)
    if kinds:
        raise ModelError(f"layers of type {', '.join(kinds):.200} keep or see something else than keys and values of a window")
    for key in _SPARSE:
        if getattr(config, key, None):
            raise ModelError(f"config.json: {key} is {getattr(config, key)!r:.100}: attention of that kind is not computed")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelError("its code computes attention by itself and cannot be given another (no _supports_attention_backend)")


def _heads(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Query heads, key/value heads, and the size of a head: that of the wider of keys and values."""
    num_heads = _count(config, "num_attention_heads")
    if getattr(config, "kv_lora_rank", None):  # latent attention: keys and values are unpacked before attention sees them
        key_dim = _count(config, "qk_nope_head_dim") + _count(config, "qk_rope_head_dim")
        return num_heads, num_heads, max(key_dim, _count(config, "v_head_dim"))
    stated = getattr(config, "head_dim", None) or getattr(config, "kv_channels", None)
    head_dim = _count(config, "hidden_size") // num_heads if stated is None else stated
    if getattr(config, "multi_query", False):
        return num_heads, 1, head_dim
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    if not isinstance(num_kv_heads, int) or not isinstance(head_dim, int) or head_dim < 1 or num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {num_heads}, num_key_value_heads {num_kv_heads!r:.100} and head_dim {head_dim!r:.100} "
            "do not fit"
        )
    return num_heads, num_kv_heads, head_dim


def _longest(config: PreTrainedConfig) -> int:
    """The longest text for which the rotation of a position does not depend on how long the text is.

    Two kinds of rotary scaling change all angles when a text grows past the trained length. Keys that are cached by then, and other
    requests of the same step, would have the wrong ones.
    """
    longest = _count(config, "max_position_embeddings")
    for rope in _rope_parameters(getattr(config, "rope_parameters", None)):
        trained = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        if rope.get("rope_type") == "longrope" and isinstance(trained, int):
            longest = min(longest, trained)
    return longest


def _rope_parameters(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """One mapping for all layers, or one for each type of layer."""
    if isinstance(parameters, Mapping):
        yield parameters
        for nested in parameters.values():
            if isinstance(nested, Mapping):
                yield nested


def _windows(config: PreTrainedConfig, num_layers: int, max_positions: int) -> Iterator[int | None]:
    """The window of each layer; one that holds the longest text is none."""
    size = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        size = None
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ModelError(f"config.json: sliding_window must be a positive integer, got {size!r:.100}")
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
    if len(kinds) != num_layers:
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries, num_hidden_layers is {num_layers}")
    for kind in kinds:
        windowed = kind == "sliding_attention" and size is not None and size < max_positions
        yield size if windowed else None


def _count(config: PreTrainedConfig, key: str) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_COUNT:
        raise ModelError(f"config.json: {key} must be an integer in 1..{_MAX_COUNT}, got {value!r:.100}")
    return value


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
