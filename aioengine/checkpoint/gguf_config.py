"""A `config.json` from the metadata of a GGUF file.

Every key under the architecture's name is either used, known to change nothing, or a reason to refuse the file: a model that is computed
a little differently from how it was trained answers fluently and wrong. Meanings and defaults are llama.cpp's (`load_hparams`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from aioengine.checkpoint.gguf import ARCHITECTURES, ROPE_FACTORS, GGUFFile, biased_parts, read_vector, transformers_name
from aioengine.checkpoint.gguf_experts import EXPERT_FAMILIES
from aioengine.checkpoint.gguf_header import ArrayInfo
from aioengine.checkpoint.gguf_vocabulary import Vocabulary
from aioengine.errors import ModelError
from aioengine.printable import get_logger

logger = get_logger(__name__)

_MAX_FREQUENCIES = 1 << 12  # half of a head's size
# Keys without a part in what the model computes.
_WITHOUT_EFFECT = frozenset(
    {
        *("vocab_size", "pooling_type", "rope.scaling.finetuned", "attention.layer_norm_epsilon", "attention.group_norm_epsilon"),
    }
)
# Values that change nothing, besides 0, false and nothing at all.
_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "attention.output_scale": (1.0,),
        "attention.rope_pattern": (1,),
        "attention.value_scale": (1.0,),
        "decoder_start_token_id": (-1,),
        "deepstack_mapping": (-1,),
        "embedding_scale": (1.0,),
        "hidden_activation": ("silu", "swish"),
        "logit_scale": (1.0,),
        "residual_scale": (1.0,),
        "rope.scaling.alpha": (1.0,),
        "rope.scaling.yarn_attn_factor": (1.0,),
        "rope.scaling.yarn_ext_factor": (-1.0,),
        "tensor_data_layout": ("Meta AI original pth", "reference"),
    }
)
_NEVER_ZERO = frozenset({"attention.causal", "attention.rope_pattern"})
# llama.cpp's own writer puts down every number it knows, with its default where the model has no use for it.
_WRITTEN_BY_LLAMA_CPP = "time_mix_extra_dim"
_DEFAULTS_OF_LLAMA_CPP: Mapping[str, float] = MappingProxyType(
    {
        "attn_logit_softcapping": 50.0,
        "router_logit_softcapping": 30.0,
        "final_logit_softcapping": 30.0,
        "expert_group_scale": 0.05,
        "token_shift_count": 2,
    }
)


class _Keys:
    """Reads keys under the architecture's prefix and remembers which were read."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.path = file.header.path
        self.architecture = file.header.architecture
        self.used: set[str] = set()

    def count(self, key: str, default: int | None = None) -> int:
        """Raises ModelError if it is missing and has no default, or 0 without one."""
        self.used.add(key)
        value = self._file.count(key)
        value = default if value is None else value
        if value is None or (value == 0 and default is None):
            raise ModelError(f"{self.path}: {self.architecture}.{key} must be a positive number, got {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        self.used.add(key)
        value = self._file.header.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.refusal(key, value, "must be a number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        self.used.add(key)
        value = self._file.header.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, str):
            raise self.refusal(key, value, "must be a text")
        return value

    def values(self, key: str) -> list[object]:
        """The value, or the items of an array; [] if absent."""
        name = f"{self.architecture}.{key}"
        value = self._file.header.metadata.get(name)
        if isinstance(value, ArrayInfo):
            return list(self._file.strings(name)) if value.of_strings else list(self._file.numbers(name))
        return [] if value is None else [value]

    def unused(self) -> list[str]:
        prefix = f"{self.architecture}."
        names = (name.removeprefix(prefix) for name in self._file.header.metadata if name.startswith(prefix))
        return sorted(name for name in names if name not in self.used)

    def refusal(self, key: str, value: object, reason: str) -> ModelError:
        shown = f"{value:g}" if isinstance(value, float) else f"{value!r:.200}"
        return ModelError(f"{self.path}: {self.architecture}.{key} {reason}, got {shown}")


def check_file(files: Sequence[GGUFFile]) -> None:
    """Raise ModelError for a file that holds no model of a supported kind, or not the whole of it."""
    header = files[0].header
    path, metadata = header.path, header.metadata
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"{path}: general.type is {kind!r:.200}: the file is no model of its own")
    experts = files[0].count("expert_count")
    if header.architecture not in (EXPERT_FAMILIES if experts else ARCHITECTURES):
        name = header.architecture + (" with experts" if experts else "")
        known = ", ".join(dict.fromkeys([*ARCHITECTURES, *EXPERT_FAMILIES]))
        raise ModelError(f"{path}: architecture {name!r} is not supported; supported: {known}")
    total = metadata.get("split.count", len(files))
    if total not in (len(files), 0):
        raise ModelError(f"{path}: split.count is {total!r:.200}, found {len(files)}; files of a split model must keep their names")
    if metadata.get("split.no", 0) != 0:
        raise ModelError(f"{path}: split.no is {metadata['split.no']!r:.200}, which is not that of the first of a model's files")
    num_tensors = sum(len(file.header.tensors) for file in files)
    if metadata.get("split.tensors.count", num_tensors) != num_tensors:
        raise ModelError(f"{path}: split.tensors.count is {metadata['split.tensors.count']!r:.200}, found {num_tensors} tensors")
    for file in files:
        for info in file.header.tensors:
            if info.name != ROPE_FACTORS and not info.name.endswith(".attn_rot_embd.weight"):
                transformers_name(
                    info.name, file.header.path, architecture=header.architecture, has_experts=bool(experts)
                )  # before weights are read


def config_json(files: Sequence[GGUFFile], vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of config.json. Raises ModelError naming the key that is missing, wrong, or not supported."""
    keys = _Keys(files[0])
    tensors = {info.name: info for file in files for info in file.header.tensors}
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    layers, context = keys.count("block_count"), keys.count("context_length")
    head_dim = keys.count("attention.key_length", hidden // heads) or hidden // heads
    if head_dim < 1:
        raise keys.refusal("attention.head_count", heads, f"must be at most embedding_length ({hidden})")
    biased = biased_parts(tensors, keys.architecture)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES.get(keys.architecture, "")],
        "model_type": keys.architecture,
        "vocab_size": _vocab_size(files, tensors, vocabulary),
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads) or heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_parameters": _rope(keys, files, head_dim=head_dim, context=context),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "attn_q" in biased,
        "mlp_bias": "ffn_up" in biased,
        "dtype": _natural_dtype({info.kind.name for info in tensors.values()}),
        "bos_token_id": vocabulary.special.get("bos"),
        "eos_token_id": vocabulary.special.get("eos"),
        "pad_token_id": vocabulary.special.get("padding"),
    }
    if keys.count("expert_count", 0):
        _set_experts(config, keys)
    elif keys.architecture == "gemma3":
        _set_gemma3(config, keys)
    else:
        _set_window(config, keys, context=context)
    _check_rest(keys, sizes={"head": head_dim, "hidden": hidden})
    return config


def _vocab_size(files: Sequence[GGUFFile], tensors: Mapping[str, Any], vocabulary: Vocabulary) -> int:
    """Rows of the embedding: what the model can look up. Raises ModelError if the vocabulary has more tokens than that."""
    header, embedding = files[0].header, tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.path} has no matrix token_embd.weight: the file is no model, or not the whole of it")
    rows = int(embedding.shape[0])
    if len(vocabulary.tokens) > rows:
        raise ModelError(
            f"{header.path}: tokenizer.ggml.tokens has {len(vocabulary.tokens)} tokens, the embedding token_embd.weight only {rows} rows"
        )
    stated = header.metadata.get(f"{header.architecture}.vocab_size", rows)
    if stated != rows:
        logger.warning("%s: %s.vocab_size is %s, the embedding has %d rows; taking those", header.path, header.architecture, stated, rows)
    return rows


def _rope(keys: _Keys, files: Sequence[GGUFFile], *, head_dim: int, context: int) -> dict[str, Any]:
    rotated = keys.count("rope.dimension_count", head_dim) or head_dim
    if rotated != head_dim:
        raise keys.refusal("rope.dimension_count", rotated, f"must be the head size, {head_dim}: partial rotation is not supported")
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.text("rope.scaling.type", "linear")
    old = keys.number("rope.scale_linear", 0.0)
    factor = keys.number("rope.scaling.factor", old) or 1.0  # 0 is none
    trained = keys.count("rope.scaling.original_context_length", context) or context
    magnitude = keys.number("rope.scaling.attn_factor", 1.0)
    fast, slow = keys.number("rope.scaling.yarn_beta_fast", 32.0), keys.number("rope.scaling.yarn_beta_slow", 1.0)
    for key, value in (("rope.freq_base", theta), ("rope.scaling.factor", factor), ("rope.scaling.attn_factor", magnitude)):
        if value <= 0:
            raise keys.refusal(key, value, "must be above 0")
    if kind not in ("none", "linear", "yarn"):
        raise keys.refusal("rope.scaling.type", kind, "must be none, linear or yarn")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind == "yarn":
        _check_yarn(keys)
        if factor != 1.0:
            rope.update(rope_type="yarn", factor=factor, original_max_position_embeddings=trained, beta_fast=fast, beta_slow=slow)
            # llama.cpp's own factor on cosines and sines, times the file's.
            rope["attention_factor"] = magnitude * (1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0)
            magnitude = 1.0
    elif kind == "linear" and factor != 1.0:
        rope.update(rope_type="linear", factor=factor)
    if magnitude != 1.0:
        rope["magnitude"] = magnitude
    for file in files:
        for info in file.header.tensors:
            if info.name == ROPE_FACTORS:
                rope["frequency_factors"] = read_vector(file, info, max_size=_MAX_FREQUENCIES).tolist()
    return rope


def _check_yarn(keys: _Keys) -> None:
    extrapolation = keys.number("rope.scaling.yarn_ext_factor", 1.0)
    if extrapolation not in (1.0, -1.0):  # -1: not set
        raise keys.refusal("rope.scaling.yarn_ext_factor", extrapolation, "must be 1")


def _set_window(config: dict[str, Any], keys: _Keys, *, context: int) -> None:
    """`attention.sliding_window` of all layers."""
    window = keys.count("attention.sliding_window", 0)
    pattern = keys.values("attention.sliding_window_pattern")
    keys.used.add("attention.sliding_window_pattern")
    if not 0 < window < context:
        return
    if pattern and not all(pattern):
        raise keys.refusal("attention.sliding_window_pattern", pattern, "must be the same for all layers")
    if pattern and len(pattern) == 1 and pattern[0] not in (1, True):
        raise keys.refusal("attention.sliding_window_pattern", pattern[0], "must be 1: layers with and without a window are not supported")
    config["sliding_window"] = window
    if keys.architecture != "llama":
        config.update(use_sliding_window=True, max_window_layers=0)
    elif config["attention_bias"] or config["mlp_bias"]:
        raise keys.refusal("attention.sliding_window", window, "is not supported beside biases")
    else:
        config.update(architectures=["MistralForCausalLM"], model_type="mistral")


def _set_experts(config: dict[str, Any], keys: _Keys) -> None:
    """What a mixture of experts has beside a dense model. All of its layers have experts, and the weights of those chosen add up to 1."""
    family, num_experts, used = EXPERT_FAMILIES[keys.architecture], keys.count("expert_count"), keys.count("expert_used_count")
    if used > num_experts:
        raise keys.refusal("expert_used_count", used, f"must be at most expert_count ({num_experts})")
    if (gate := keys.count("expert_gating_func", 1)) not in (0, 1):
        raise keys.refusal("expert_gating_func", gate, "must be 1 (softmax)")
    for key in ("magnitude", "frequency_factors"):  # transformers' code, which runs these models, would not hear of them
        if key in config["rope_parameters"]:
            raise ModelError(f"{keys.path}: rotation with {key} is not supported for a mixture of experts")
    config.update(architectures=[family.architecture], model_type=family.model_type, num_experts_per_tok=used)
    config[family.num_experts_key] = num_experts
    size = keys.count("expert_feed_forward_length", config["intermediate_size"]) or config["intermediate_size"]
    if keys.architecture == "llama":
        config["intermediate_size"] = size
    else:
        config.update(moe_intermediate_size=size, norm_topk_prob=True)


def _set_gemma3(config: dict[str, Any], keys: _Keys) -> None:
    """What Gemma 3 has beside a Llama: a layer's kind says its window and its angles; activation and scale follow from the name."""
    layers, window = config["num_hidden_layers"], keys.count("attention.sliding_window", 0)
    stated = keys.values("attention.sliding_window_pattern") or [6]  # one flag for each layer, or one for how many are of a kind
    keys.used.add("attention.sliding_window_pattern")
    if len(stated) == layers and layers > 1:
        windowed = [bool(flag) for flag in stated]
    elif len(stated) == 1 and isinstance(stated[0], int) and stated[0] > 0:
        windowed = [(layer + 1) % stated[0] != 0 for layer in range(layers)]
    else:
        raise keys.refusal("attention.sliding_window_pattern", stated, f"must be a positive number or {layers} flags")
    rope = config.pop("rope_parameters")
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
    if "magnitude" in rope:
        local["magnitude"] = rope["magnitude"]
    del config["hidden_act"]
    config.update(
        model_type="gemma3_text",
        hidden_activation="gelu_pytorch_tanh",
        rope_parameters={"full_attention": rope, "sliding_attention": local},
        sliding_window=window or None,
        layer_types=["sliding_attention" if flag and window else "full_attention" for flag in windowed],
        # Of the largest, with 62 layers, it is not the size of a head (llama.cpp goes by that as well).
        query_pre_attn_scalar=config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"],
    )


def _check_rest(keys: _Keys, *, sizes: Mapping[str, int]) -> None:
    """Every key that nobody has read must say what is so anyway."""
    same = {
        "attention.value_length": sizes["head"],
        "attention.key_length_swa": sizes["head"],
        "attention.value_length_swa": sizes["head"],
        "rope.dimension_count_swa": sizes["head"],
        "embedding_length_out": sizes["hidden"],
    }
    dumped = keys.values(_WRITTEN_BY_LLAMA_CPP) != []
    for key in keys.unused():
        values = keys.values(key)
        neutral = _NEUTRAL.get(key, ())
        if key in same:
            if values != [same[key]]:
                raise keys.refusal(key, values[0] if len(values) == 1 else values, f"must be {same[key]}")
        elif key == "attention.scale":
            value = keys.number(key)
            if value and not math.isclose(value, sizes["head"] ** -0.5, rel_tol=1e-5):
                raise keys.refusal(key, value, f"must be 1/sqrt({sizes['head']})")
        elif key == "hidden_activation" and keys.architecture == "gemma3":
            if values != ["gelu_pytorch_tanh"]:
                raise keys.refusal(key, values[0], "must be 'gelu_pytorch_tanh'")
        elif key == "rope.freq_base_swa":
            if keys.number(key) != keys.number("rope.freq_base", 10000.0):
                raise keys.refusal(key, values[0], "must be that of all layers")
        elif key in _WITHOUT_EFFECT or (dumped and values == [_float32(_DEFAULTS_OF_LLAMA_CPP.get(key))]):
            continue
        elif not all(value in neutral or (not value and key not in _NEVER_ZERO) for value in values):
            wanted = f"must be {' or '.join(map(repr, neutral))}" if neutral else "is not supported: it changes what the model computes"
            raise keys.refusal(key, values[0] if len(values) == 1 else values, wanted)


def _float32(value: float | None) -> float | None:
    """As a file's float32 holds it."""
    return None if value is None else float(struct.unpack("<f", struct.pack("<f", value))[0])


def _natural_dtype(kinds: set[str]) -> str:
    """What to compute in on a GPU. Block formats scale by float16 numbers, so float16 loses next to nothing."""
    if kinds <= {"F32", "F64"}:
        return "float32"
    return "bfloat16" if kinds <= {"BF16", "F32"} else "float16"
