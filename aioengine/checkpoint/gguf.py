"""GGUF files: memory-mapped tensors under the names that transformers gives them.

Constants and the less common block formats come from the `gguf` package.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from gguf.constants import GGMLQuantizationType

from aioengine.checkpoint.dequantize import dequantize_into, plain_dtype
from aioengine.checkpoint.gguf_experts import expert_name
from aioengine.checkpoint.gguf_header import ArrayInfo, Cursor, TensorInfo, map_file, parse_header
from aioengine.checkpoint.stored_tensor import PackedRows, StoredTensor, Zeros
from aioengine.errors import ModelError

# GGUF's architecture -> transformers' class and model type
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"gemma3": "Gemma3ForCausalLM", "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
)

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Names that mean something else, or are, in some architectures only.
_OTHER_NAMES = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
}
# Architectures whose norms are stored with the 1 that transformers adds when it computes.
_NORMS_WITH_ONE = frozenset({"gemma3"})
# Read into the config when the file is converted (Llama 3's long-context frequencies).
ROPE_FACTORS = "rope_freqs.weight"
# Frequencies that follow from the config, in old files.
_REPEATED = re.compile(r"blk\.\d+\.attn_rot_embd\.weight|rope_freqs\.weight")
# Tensors that may have a bias. A model has the biases of a group or has not: those that a file leaves out are zeros.
_BIASED = (("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down"))


_FLOAT_KINDS = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})


def split_files(path: Path) -> tuple[Path, ...]:
    """All files of a model split as "name-00001-of-00003.gguf"; `path` alone if it is not split. Raises ModelError for a hole."""
    match = _SPLIT.search(path.name)
    if match is None:
        return (path,)
    number, total = int(match[1]), int(match[2])
    if not 1 <= number <= total:
        raise ModelError(f"{path.name} names itself file {number} of {total}")
    files = tuple(path.with_name(f"{path.name[: match.start()]}-{i:05d}-of-{total:05d}.gguf") for i in range(1, total + 1))
    for file in files:
        if not file.is_file():
            raise ModelError(f"{path.name} is one of {total} files; {file} is missing")
    return files


class GGUFFile:
    """A mapped file. Tensors are read from the page cache when asked for, and hold the mapping open."""

    def __init__(self, path: Path) -> None:
        self._mapped = map_file(path)
        self.header = parse_header(path, self._mapped)
        self._bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)  # [file size]

    def raw(self, info: TensorInfo) -> torch.Tensor:
        """The stored bytes as [rows, bytes_per_row] uint8; a vector is one row."""
        rows = info.shape[0] if len(info.shape) > 1 else 1
        return self._bytes[info.start : info.start + info.num_bytes].view(rows, -1)

    def strings(self, key: str) -> list[str]:
        """The items of a metadata array of strings. Raises ModelError if it is something else or not UTF-8."""
        info = self.header.metadata.get(key)
        if not isinstance(info, ArrayInfo) or not info.of_strings:
            raise ModelError(f"{self.header.path}: {key} must be an array of strings, got {info!r:.200}")
        cursor = Cursor(self._mapped, self.header.path)
        cursor.at = info.start
        return [cursor.string(f"an item of {key}") for _ in range(info.num_items)]

    def numbers(self, key: str) -> list[float]:
        """The items of a metadata array of numbers. Raises ModelError if it is something else."""
        info = self.header.metadata.get(key)
        if not isinstance(info, ArrayInfo) or info.of_strings:
            raise ModelError(f"{self.header.path}: {key} must be an array of numbers, got {info!r:.200}")
        return list(struct.unpack_from(f"<{info.num_items}{info.code}", self._mapped, info.start))

    def count(self, key: str) -> int | None:
        """A count under the architecture's prefix, such as "attention.head_count"; None if absent. One for each layer is one if all agree.

        Raises ModelError if it is no count, or if layers differ.
        """
        name = f"{self.header.architecture}.{key}"
        value: object = self.header.metadata.get(name)
        if isinstance(value, ArrayInfo) and value.num_items:
            first, *others = numbers = self.numbers(name)
            if any(other != first for other in others):
                raise ModelError(
                    f"{self.header.path}: {name} differs between layers ({numbers!r:.200}); only layers that are alike can be run"
                )
            value = first
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self.header.path}: {name} must be a count, got {value!r:.200}")
        if value < 0:
            raise ModelError(f"{self.header.path}: {name} must not be negative, got {value}")
        return value

    @property
    def is_quantized(self) -> bool:
        """A matrix is stored in blocks of few bits."""
        return any(len(info.shape) > 1 and info.kind not in _FLOAT_KINDS for info in self.header.tensors)

    def tensors(self, *, has_experts: bool = False) -> Iterator[GGUFTensor]:
        """Every weight, renamed; of a tensor that holds all experts of a layer, each by itself.

        Raises ModelError for a tensor that no supported architecture has.
        """
        for info in self.header.tensors:
            if not _REPEATED.fullmatch(info.name):
                architecture = self.header.architecture
                name = transformers_name(info.name, self.header.path, architecture=architecture, has_experts=has_experts)
                if len(info.shape) == 3 and "{}" in name:
                    for expert in range(info.shape[0]):
                        yield GGUFTensor(self, info, name.format(expert), 0, expert=expert)
                else:
                    with_one = architecture in _NORMS_WITH_ONE and info.name.endswith("norm.weight")
                    yield GGUFTensor(self, info, name, self._heads_to_unpermute(info), -1.0 if with_one else 0.0)

    def _heads_to_unpermute(self, info: TensorInfo) -> int:
        """How many heads' rows to put back in order; 0: none.

        llama.cpp turns adjacent dimensions of a head (its architecture "llama"), transformers turns i with i + dim/2, so
        llama.cpp's converter interleaves the rows of queries and keys.
        """
        part = info.name.split(".")[-2]
        if self.header.architecture != "llama" or part not in ("attn_q", "attn_k"):
            return 0
        heads = self.count("attention.head_count") or 0
        if part == "attn_k":
            heads = self.count("attention.head_count_kv") or heads
        if heads and info.shape[0] % (2 * heads):
            raise ModelError(
                f"{self.header.path}: tensor {info.name!r} has {info.shape[0]} rows, which are not {heads} heads of an even size"
            )
        return heads


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A `StoredTensor` of a GGUF file."""

    file: GGUFFile
    info: TensorInfo
    name: str
    permuted_heads: int
    offset: float = 0.0  # to add to a vector's numbers
    expert: int | None = None  # the tensor is this slice of what the file holds

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape if self.expert is None else self.info.shape[1:]

    def read_into(self, out: torch.Tensor) -> None:
        if len(self.shape) > 1:
            dequantize_into(self._rows(), self.info.kind, out)
        elif self.permuted_heads:  # a bias: its numbers are rows
            flat = torch.empty(1, self.shape[0])
            dequantize_into(self.file.raw(self.info), self.info.kind, flat)
            out.copy_(_unpermute(flat.view(-1, 1), self.permuted_heads).view(-1))
        elif self.offset:
            exact = torch.empty(self.shape)
            dequantize_into(self.file.raw(self.info), self.info.kind, exact.view(1, -1))
            out.copy_(exact.add_(self.offset))
        else:
            dequantize_into(self.file.raw(self.info), self.info.kind, out.view(1, -1))

    def read_packed(self) -> PackedRows | None:
        if len(self.shape) == 1 or plain_dtype(self.info.kind) is not None:
            return None
        return PackedRows(kind=self.info.kind.name, data=self._rows())

    def _rows(self) -> torch.Tensor:
        """[rows, bytes_per_row] uint8 in transformers' order; blocks run along a row, so rows move whole."""
        rows = self.file.raw(self.info)
        if self.expert is not None:
            return rows[self.expert].view(self.shape[0], -1)
        return _unpermute(rows, self.permuted_heads) if self.permuted_heads else rows


def open_gguf(paths: Sequence[Path]) -> Iterator[StoredTensor]:
    """Every weight of a model, in one file or several, and zeros for biases that only some of its matrices have."""
    files = [GGUFFile(path) for path in paths]
    has_experts = bool(files[0].count("expert_count"))
    for file in files:
        yield from file.tensors(has_experts=has_experts)
    biased = biased_parts([info.name for file in files for info in file.header.tensors], files[0].header.architecture)
    names = {info.name for file in files for info in file.header.tensors}
    for file in files:
        for info in file.header.tensors:
            part = info.name.split(".")[-2]
            bias = info.name.removesuffix("weight") + "bias"
            if info.name.endswith(".weight") and part in biased and bias not in names:
                yield Zeros(transformers_name(bias, file.header.path, architecture=files[0].header.architecture), info.shape[:1])


def biased_parts(names: Iterable[str], architecture: str) -> frozenset[str]:
    """Which of a layer's matrices get a bias: "attn_q", ... A Qwen2 has those of queries, keys and values, and no other."""
    if architecture == "qwen2":
        return frozenset(_BIASED[0][:3])
    found = {name.split(".")[-2] for name in names if name.endswith(".bias") and name.startswith("blk.")}
    return frozenset(part for group in _BIASED for part in group if found.intersection(group))


def read_vector(file: GGUFFile, info: TensorInfo, *, max_size: int) -> torch.Tensor:
    """A one-dimensional tensor as float32. Raises ModelError for another shape or more than `max_size` numbers."""
    if len(info.shape) != 1 or info.shape[0] > max_size:
        raise ModelError(f"{file.header.path}: tensor {info.name!r} must be one row of at most {max_size}, got {list(info.shape)}")
    out = torch.empty(info.shape)
    dequantize_into(file.raw(info), info.kind, out.view(1, -1))
    return out


def _unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * (dim/2) * 2, width] -> [heads * 2 * (dim/2), width]."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def transformers_name(name: str, path: Path, *, architecture: str, has_experts: bool = False) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight". Raises ModelError for an unknown name.

    The name of a tensor of all experts of a layer has "{}" for the number of one.
    """
    base, _, kind = name.rpartition(".")
    if base in _TOP_NAMES:
        return f"{_TOP_NAMES[base]}.{kind}"
    prefix, _, rest = base.partition(".")
    layer, _, part = rest.partition(".")
    known = _OTHER_NAMES.get(architecture, {}).get(part) or _LAYER_NAMES.get(part)
    if known is None and has_experts:
        known = expert_name(part, architecture=architecture)
    if prefix != "blk" or known is None:
        raise ModelError(f"{path}: tensor {name!r} belongs to a kind of model that is not supported")
    return f"model.layers.{layer}.{known}.{kind}"
