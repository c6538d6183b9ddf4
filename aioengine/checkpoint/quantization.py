"""What a config.json says of quantized weights, and which of it is served: `quantization_config`, `quant_method` first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from aioengine.errors import ModelError

KEYS = ("quantization_config", "compression_config")
Layout = Literal["gptq", "gptq_v2", "awq", "compressed", "float8", "nf4"]
# Of other ways in which a method's tensors are arranged; keys and values of those that are read.
_AWQ_VERSIONS = frozenset({"gemm"})
_GPTQ_FORMATS: Mapping[str, Layout] = MappingProxyType({"gptq": "gptq", "gptq_v2": "gptq_v2"})
_BLOCK = 32  # columns that share a scale on the packed kernels; a group is some of these
_MAX_GROUP = 1 << 16


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the matrices of a safetensors folder are stored. Which of them are, the tensors say."""

    method: str
    layout: Layout
    group_size: int = -1  # columns that share a scale; -1: all of a row
    symmetric: bool = False  # "compressed": no zero points are stored
    act_order: bool = False  # GPTQ's desc_act: columns belong to groups in no order
    block: tuple[int, int] | None = None  # "float8": rows and columns that share a scale; None: a tensor or a row does

    @property
    def packs(self) -> bool:
        """Whether matrices stay in few bits on the packed kernels."""
        return self.layout not in ("float8", "nf4")


def read_quantization(raw: Mapping[str, Any]) -> Quantization | None:
    """None for plain weights. Raises ModelError, naming method, key and value, for what is not served. raw: config.json."""
    key = next((name for name in KEYS if raw.get(name)), None)
    if key is None:
        return None
    stated = raw[key]
    if not isinstance(stated, Mapping):
        raise ModelError(f"config.json: {key} must be an object, got {stated!r:.200}")
    fields = _Fields(key, stated)
    readers = {
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _float8,
        "bitsandbytes": _bitsandbytes,
        "compressed-tensors": _compressed_tensors,
    }
    reader = readers.get(fields.method) if isinstance(fields.method, str) else None
    if reader is None:
        bits = fields.first("bits", "w_bit")
        fields.refuse("" if bits is None else f"({bits!r:.20} bits)", f"supported: {', '.join(readers)}")
    return reader(fields)


class _Fields:
    """The object of config.json, and how a refusal of it reads."""

    def __init__(self, key: str, stated: Mapping[str, Any]) -> None:
        self.key = key
        self.stated = stated
        method = stated.get("quant_method")
        if method is None and (stated.get("load_in_4bit") or stated.get("load_in_8bit")):
            method = "bitsandbytes"
        self.method: object = method

    def first(self, *names: str) -> Any:
        return next((self.stated[name] for name in names if self.stated.get(name) is not None), None)

    def refuse(self, what: str, supported: str = "") -> NoReturn:
        hint = f"; {supported}" if supported else ""
        raise ModelError(
            f"config.json: {self.key}: weights quantized by quant_method {self.method!r:.100}{' ' + what if what else ''} "
            f"are not supported{hint}; use the model that was quantized, or a GGUF file of it"
        )

    def four_bits(self) -> None:
        bits = self.first("bits", "w_bit")
        if bits != 4 or isinstance(bits, bool):
            self.refuse(f"({bits!r:.20} bits)", "4 bits are")

    def group_size(self, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or (0 < value <= _MAX_GROUP and value % _BLOCK == 0)):
            self.refuse(f"with group_size {value!r:.50}", f"-1 and multiples of {_BLOCK} up to {_MAX_GROUP} are")
        return value


def _gptq(fields: _Fields) -> Quantization:
    fields.four_bits()
    stated = fields.first("checkpoint_format", "format") or "gptq"
    layout = _GPTQ_FORMATS.get(stated) if isinstance(stated, str) else None
    if layout is None:
        fields.refuse(f"with checkpoint_format {stated!r:.50}", f"{', '.join(_GPTQ_FORMATS)} are")
    dynamic = fields.first("dynamic") or {}
    if not isinstance(dynamic, Mapping) or any(not str(rule).startswith("-:") for rule in dynamic):  # "-:" leaves a layer as it is
        fields.refuse(f"with other settings by layer (dynamic {dynamic!r:.100})", "one setting for all is")
    act_order = fields.stated.get("desc_act") is True
    return Quantization("gptq", layout, fields.group_size(fields.first("group_size")), act_order=act_order)


def _awq(fields: _Fields) -> Quantization:
    fields.four_bits()
    version = str(fields.first("version", "format") or "gemm").lower()
    if version not in _AWQ_VERSIONS:
        fields.refuse(f"with version {version!r:.50}", f"{', '.join(sorted(_AWQ_VERSIONS))} is")
    if fields.stated.get("zero_point") is False:
        fields.refuse("with zero_point false", "true is")
    return Quantization("awq", "awq", fields.group_size(fields.first("group_size", "q_group_size")))


def _float8(fields: _Fields) -> Quantization:
    kind = fields.first("fmt") or "e4m3"
    if kind != "e4m3":
        fields.refuse(f"with fmt {kind!r:.50}", "e4m3 is")
    return Quantization("fp8", "float8", block=_block_size(fields, fields.first("weight_block_size"), "weight_block_size"))


def _block_size(fields: _Fields, block: Any, name: str) -> tuple[int, int] | None:
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or not 0 < size <= _MAX_GROUP for size in block):
        fields.refuse(f"with {name} {block!r:.50}", "two positive numbers are, rows and columns")
    return block[0], block[1]


def _bitsandbytes(fields: _Fields) -> Quantization:
    if not fields.stated.get("load_in_4bit"):
        fields.refuse("(8 bits)", "4 bits are (load_in_4bit, nf4 and fp4)")
    kind = fields.first("bnb_4bit_quant_type") or "fp4"  # as in transformers
    if kind not in ("nf4", "fp4"):
        fields.refuse(f"with bnb_4bit_quant_type {kind!r:.50}", "nf4 and fp4 are")
    return Quantization("bitsandbytes", "nf4")


def _compressed_tensors(fields: _Fields) -> Quantization:
    stated, groups = fields.first("format"), fields.first("config_groups")
    if stated not in ("pack-quantized", "float-quantized"):
        fields.refuse(f"with format {stated!r:.50}", "pack-quantized (4 bits) and float-quantized are")
    if not isinstance(groups, Mapping) or not groups:
        fields.refuse(f"with config_groups {groups!r:.50}")
    found = list(dict.fromkeys(_compressed_group(fields, group, packed=stated == "pack-quantized") for group in groups.values()))
    if len(found) != 1:
        fields.refuse(f"with {len(found)} different settings in config_groups", "one for all is")
    return found[0]


def _compressed_group(fields: _Fields, group: Any, *, packed: bool) -> Quantization:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        fields.refuse(f"with weights {weights!r:.50}")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    if not packed:
        if (bits, kind) != (8, "float") or strategy not in ("tensor", "channel", "block"):
            fields.refuse(
                f"({bits!r:.20} bits, type {kind!r:.20}, strategy {strategy!r:.20})", "8 bits, float, by tensor, channel or block are"
            )
        block = _block_size(fields, weights.get("block_structure"), "block_structure") if strategy == "block" else None
        return Quantization("compressed-tensors", "float8", block=block)
    if (bits, kind) != (4, "int"):
        fields.refuse(f"({bits!r:.20} bits, type {kind!r:.20})", "4 bits, int are")
    if strategy not in ("group", "channel"):
        fields.refuse(f"with strategy {strategy!r:.20}", "group and channel are")
    size = fields.group_size(weights.get("group_size")) if strategy == "group" else -1
    act_order = weights.get("actorder") not in (None, False, "weight", "static")  # these leave the groups in order
    return Quantization("compressed-tensors", "compressed", size, symmetric=weights.get("symmetric", True) is True, act_order=act_order)
