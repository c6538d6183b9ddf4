"""LoRA adapters beside the products of a decoder's layers: which rows of a step have which, and how their parts are laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F

from aioengine.checkpoint.lora import LoraAdapter
from aioengine.errors import ModelError
from aioengine.models.config import DecoderConfig

# The products of a layer, and the modules whose rows each of them is made of.
PRODUCTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"qkv": ("q_proj", "k_proj", "v_proj"), "output": ("o_proj",), "gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
)


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """Neighbouring rows of a step that have the same adapter; rows in no run have none."""

    name: str
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a product that come from one module, and what an adapter does to them; nothing where both are None."""

    rows: int
    a: torch.Tensor | None  # [rank, columns]
    b: torch.Tensor | None  # [rows, rank]


LayerParts = Mapping[str, Sequence[Part]]  # by product


def lay_out(adapter: LoraAdapter, config: DecoderConfig) -> list[LayerParts]:
    """One a layer. Raises ModelError naming what does not fit the model."""
    sizes = _sizes(config)
    for (layer, module), pair in adapter.pairs.items():
        if layer >= config.num_layers:
            raise ModelError(f"the adapter changes layer {layer}, the model has {config.num_layers} layers")
        rows, columns = sizes[module]
        if pair.a.shape[1] != columns or pair.b.shape[0] != rows:
            raise ModelError(
                f"the adapter's {module} of layer {layer} is for [{pair.b.shape[0]}, {pair.a.shape[1]}], the model's is [{rows}, {columns}]"
            )
    return [
        {product: [_part(adapter, layer, module, sizes[module][0]) for module in modules] for product, modules in PRODUCTS.items()}
        for layer in range(config.num_layers)
    ]


def _part(adapter: LoraAdapter, layer: int, module: str, rows: int) -> Part:
    pair = adapter.pairs.get((layer, module))
    return Part(rows, None, None) if pair is None else Part(rows, pair.a, pair.b)


def _sizes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """The rows and columns of each module that may be adapted."""
    hidden, size = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "q_proj": (heads, hidden),
        "k_proj": (kv_heads, hidden),
        "v_proj": (kv_heads, hidden),
        "o_proj": (hidden, heads),
        "gate_proj": (size, hidden),
        "up_proj": (size, hidden),
        "down_proj": (hidden, size),
    }


class LayerAdapters:
    """One layer's adapters in one step."""

    def __init__(self, runs: Sequence[tuple[int, int, LayerParts]]) -> None:
        self._runs = runs

    def add(self, product: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x [n, columns], y [n, rows], which is changed and returned."""
        for first, end, parts in self._runs:
            row = 0
            for part in parts[product]:
                if part.a is not None and part.b is not None:
                    y[first:end, row : row + part.rows] += F.linear(F.linear(x[first:end], part.a), part.b)
                row += part.rows
        return y


class PlainAdapters:
    """The adapters that a model on PyTorch's kernels has loaded."""

    def __init__(self) -> None:
        self._loaded: dict[str, list[LayerParts]] = {}

    def load(self, name: str, layers: Sequence[LayerParts], *, dtype: torch.dtype, device: torch.device) -> None:
        def convert(part: Part) -> Part:
            return Part(part.rows, *(None if x is None else x.to(device=device, dtype=dtype) for x in (part.a, part.b)))

        self._loaded[name] = [{product: [convert(part) for part in parts] for product, parts in layer.items()} for layer in layers]

    def unload(self, name: str) -> None:
        del self._loaded[name]

    def of_layers(self, runs: Sequence[AdapterRun], num_layers: int) -> list[LayerAdapters | None]:
        """For a step with these runs."""
        if not runs:
            return [None] * num_layers
        return [LayerAdapters([(run.first, run.end, self._loaded[run.name][layer]) for run in runs]) for layer in range(num_layers)]
