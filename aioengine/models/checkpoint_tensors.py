"""The tensors of a checkpoint as the decoders expect them: names, what is repeated, left out, or too many.

Checkpoints differ from what their config.json says in ways that transformers loads, and so do we, with a line in the log: the
prefix "model." is missing, more layers are stored than used, a bias is left out, other heads lie beside the model, and the
head is tied or is not. What would change the result without a word is refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from aioengine.checkpoint.safetensors import SafetensorsTensor
from aioengine.checkpoint.stored_tensor import PackedRows, StoredTensor, UnreadRows, Zeros
from aioengine.errors import ModelError
from aioengine.models.config import DecoderConfig
from aioengine.printable import get_logger

logger = get_logger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BASE = "model."
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
_BARE = re.compile(r"(layers\.\d|embed_tokens\.|norm\.)")  # how names begin that lack the prefix
_BIAS = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj\.bias")
# Numbers that only mean something together with a method of quantization: GPTQ, AWQ, fp8, compressed-tensors, bitsandbytes.
_QUANTIZED = re.compile(
    r"\.(qweight|qzeros|g_idx|weight_packed|weight_scale(_inv)?|weight_zero_point|weight_shape|SCB|weight\.(absmax|quant_.*))$"
)


@dataclass(frozen=True, slots=True)
class _Renamed:
    """A stored tensor under the name that the decoders know."""

    name: str
    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def read_into(self, out: torch.Tensor) -> None:
        self.stored.read_into(out)

    def read_packed(self) -> PackedRows | UnreadRows | None:
        return self.stored.read_packed()


@dataclass(frozen=True, slots=True)
class _PlusOne:
    """A norm's weights, which are stored as distances from 1. Read into float32 (`DecoderConfig.norms_from_one`)."""

    stored: StoredTensor

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def read_into(self, out: torch.Tensor) -> None:
        self.stored.read_into(out)
        out += 1.0

    def read_packed(self) -> PackedRows | None:
        return None


def settle_tensors(config: DecoderConfig, tensors: Sequence[StoredTensor]) -> tuple[DecoderConfig, list[StoredTensor]]:
    """The tensors that the model is filled with, under its names, and the config with the head as the checkpoint has it.

    Nothing is read but a head that may be the embedding. Raises ModelError for quantized tensors and for biases that
    config.json does not have.
    """
    refuse_other_kinds(tensors)
    named = [_with_prefix(stored) for stored in tensors if not stored.name.endswith("rotary_emb.inv_freq")]
    kept = _without_the_unused(named, num_layers=config.num_layers)
    expected_biases = dict(_bias_shapes(config))
    _refuse_other_biases(kept, expected_biases)
    present = {stored.name for stored in kept}
    missing = [name for name in expected_biases if name not in present]
    if missing:
        logger.warning("the checkpoint lacks %s: taken as 0", some(missing))
    for stored in kept:
        original = stored.stored if isinstance(stored, _Renamed) else stored
        if isinstance(original, SafetensorsTensor):
            original.check()
    if config.norms_from_one:
        kept = [_PlusOne(stored) if stored.name.endswith("norm.weight") else stored for stored in kept]
    config, kept = _settle_head(config, kept)
    return config, [*kept, *(Zeros(name, expected_biases[name]) for name in missing)]


def refuse_other_kinds(tensors: Sequence[StoredTensor]) -> None:
    for stored in tensors:
        if ".lora_" in stored.name:
            raise ModelError(
                f"tensor {stored.name:.200} belongs to an adapter, not to a model: not supported; load the model that it was made for, or "
                "merge the adapter into it (peft: merge_and_unload) and save the result"
            )
        if _QUANTIZED.search(stored.name):
            raise ModelError(
                f"tensor {stored.name:.200} is part of quantized weights, of which config.json says nothing (quantization_config): "
                "not supported; use the model that was quantized, or a GGUF file of it"
            )


def _with_prefix(stored: StoredTensor) -> StoredTensor:
    return _Renamed(_BASE + stored.name, stored) if _BARE.match(stored.name) else stored


def _without_the_unused(tensors: Sequence[StoredTensor], *, num_layers: int) -> list[StoredTensor]:
    """Without layers past the last one, and without what lies beside the decoder: value heads, vision towers."""
    kept: list[StoredTensor] = []
    unused: list[str] = []
    for stored in tensors:
        layer = _LAYER.match(stored.name)
        beside = not stored.name.startswith((_BASE, "lm_head."))
        if beside or (layer is not None and int(layer[1]) >= num_layers):
            unused.append(stored.name)
        else:
            kept.append(stored)
    if not any(_LAYER.match(stored.name) for stored in kept):
        raise ModelError(f"no tensor of the checkpoint is that of a layer (model.layers.0.); there are {some([t.name for t in tensors])}")
    if unused:
        logger.warning("config.json (num_hidden_layers %d) has no use for %s of the checkpoint", num_layers, some(unused))
    return kept


def _refuse_other_biases(tensors: Sequence[StoredTensor], expected: dict[str, tuple[int, ...]]) -> None:
    for stored in tensors:
        if _BIAS.fullmatch(stored.name) and stored.name not in expected:
            raise ModelError(
                f"tensor {stored.name} of the checkpoint is none of this architecture's: config.json has no bias there "
                "(keys attention_bias, mlp_bias)"
            )


def _bias_shapes(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for i in range(config.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        if config.qkv_bias:
            yield f"{attention}.q_proj.bias", (heads,)
            yield f"{attention}.k_proj.bias", (kv_heads,)
            yield f"{attention}.v_proj.bias", (kv_heads,)
        if config.output_bias:
            yield f"{attention}.o_proj.bias", (config.hidden_size,)
        if config.mlp_bias:
            yield f"{mlp}.gate_proj.bias", (config.intermediate_size,)
            yield f"{mlp}.up_proj.bias", (config.intermediate_size,)
            yield f"{mlp}.down_proj.bias", (config.hidden_size,)


def _settle_head(config: DecoderConfig, tensors: list[StoredTensor]) -> tuple[DecoderConfig, list[StoredTensor]]:
    """A tied head may be stored as well. If it is the embedding, one is kept; if it is not, the model has two: it was trained so."""
    by_name = {stored.name: stored for stored in tensors}
    head, embedding = by_name.get(HEAD), by_name.get(EMBEDDING)
    if not config.tie_word_embeddings or head is None:
        return config, tensors
    others = [stored for stored in tensors if stored.name != HEAD]
    if embedding is None:
        return config, [_Renamed(EMBEDDING, head), *others]
    if _are_equal(head, embedding):
        return config, others
    logger.warning(
        "config.json says tie_word_embeddings: true, but %s and %s of the checkpoint differ: both are used; "
        "write tie_word_embeddings: false",
        HEAD,
        EMBEDDING,
    )
    return dataclasses.replace(config, tie_word_embeddings=False), tensors


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    if first.shape != second.shape:
        return False
    numbers = torch.empty(first.shape), torch.empty(second.shape)
    first.read_into(numbers[0])
    second.read_into(numbers[1])
    return torch.equal(*numbers)


def some(names: Sequence[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(f"{name:.100}" for name in first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")
