"""All layers of a pre-norm decoder with a gated MLP (Llama, Mistral, Qwen 2 and 3, Gemma 3) in one native call a step.

Python around seven small calls a layer costs more than the arithmetic at one token a step; this leaves one call. The bits
are those of the single operations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from weakref import WeakSet

import torch

from aioengine_kernels.cpu.abi import AllReduce, CacheGroup, Layer, Matrix, Step
from aioengine_kernels.cpu.kernels import CpuKernels, KvCacheFormat
from aioengine_kernels.cpu.library import ISAS, open_library
from aioengine_kernels.cpu.low_rank import PackedAdapter
from aioengine_kernels.cpu.packing import FusedMatrix, PackedMatrix

# The numbers of the C ABI. "gelu_tanh" is GELU in its tanh approximation.
ACTIVATIONS: Mapping[str, int] = MappingProxyType({"silu": 0, "gelu_tanh": 1})
_MAX_VIEWS = 64


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Norm weights are float32 [hidden], those of queries and keys [head_dim]; biases float32 [rows of the matrix]."""

    qkv: PackedMatrix | FusedMatrix  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden]
    output: PackedMatrix | FusedMatrix  # [hidden, num_heads * head_dim]
    gate_up: PackedMatrix | FusedMatrix  # [2 * intermediate, hidden]
    down: PackedMatrix | FusedMatrix  # [hidden, intermediate]
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    attention_out_norm: torch.Tensor | None = None  # of what attention adds to the residual
    mlp_out_norm: torch.Tensor | None = None  # of what the MLP adds to it
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderShape:
    num_heads: int
    cache_format: KvCacheFormat
    hidden_size: int
    rms_norm_eps: float
    scale: float  # of attention scores
    logits_soft_cap: float | None = None
    activation: str = "silu"  # of the gate: a key of ACTIVATIONS


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """What the layers of a KV-cache group share in one step."""

    slots: torch.Tensor  # [n] int64
    block_table: torch.Tensor  # [num_reqs, *] int32; entries of blocks that lie wholly behind the window are never read
    sliding_window: int | None = None  # a query sees that many positions, its own included


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Neighbouring rows of a step that have the same adapter."""

    adapter: PackedAdapter
    first: int
    end: int


class NativeDecoder:
    """Keeps the addresses of the weights and caches it was made with, and the tensors themselves, so that they stay."""

    def __init__(
        self,
        kernels: CpuKernels,
        shape: DecoderShape,
        layers: Sequence[LayerWeights],
        *,
        final_norm: torch.Tensor,  # [hidden] float32
        cos_sin: torch.Tensor | Sequence[torch.Tensor],  # [positions, head_dim] float32: cosines, then sines; or one for each layer
        kv_caches: Sequence[torch.Tensor],  # one a layer, in shape.cache_format; layers of different groups may share one
        fast: bool,
        layer_groups: Sequence[int] | None = None,  # which of the groups of `forward` each layer belongs to; None: there is one
        all_reduce: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Raises ValueError for shapes that do not fit together.

        all_reduce: the weights are one rank's part of a layer's heads and of its MLP, and this sums a flat float32 tensor over the
        ranks, in place. What it raises, `forward` raises.
        """
        self._library = open_library()
        f = shape.cache_format
        reason = KvCacheFormat.why_not(f.dtype, f.block_size, shape.num_heads, f.num_kv_heads, f.head_dim)
        if reason is not None:
            raise ValueError(reason)
        if len(layers) != len(kv_caches) or not layers:
            raise ValueError(f"{len(layers)} layers and {len(kv_caches)} caches: there must be one of each, and at least one")
        numbers = [0] * len(layers) if layer_groups is None else list(layer_groups)
        if len(numbers) != len(layers) or min(numbers) < 0:
            raise ValueError(f"layer_groups must be {len(layers)} numbers from 0 on, one a layer, got {numbers}")
        tables = [cos_sin] * len(layers) if isinstance(cos_sin, torch.Tensor) else list(cos_sin)
        if len(tables) != len(layers):
            raise ValueError(f"cos_sin must be one table, or one for each of {len(layers)} layers, got {len(tables)}")
        for layer, cache, table in zip(layers, kv_caches, tables, strict=True):
            _check_layer(layer, shape)
            _check(cache, "kv_cache", torch.uint8, f.shape(cache.shape[0]))
            _check(table, "cos_sin", torch.float32, (table.shape[0], f.head_dim))
        _check(final_norm, "final_norm", torch.float32, (shape.hidden_size,))
        self._checked_adapters: WeakSet[PackedAdapter] = WeakSet()
        self._kept = (tuple(layers), tuple(kv_caches), final_norm, tables)
        self._shape = shape
        self._num_layers = len(layers)
        self._reduction = None if all_reduce is None else _Reduction(all_reduce)
        self._parts: list[Matrix] = []  # what the `next` of the layers' matrices points to
        self._layers = (Layer * len(layers))(
            *(
                _layer_struct(layer, cache, table, group=group, fast=fast, kept=self._parts)
                for layer, cache, table, group in zip(layers, kv_caches, tables, numbers, strict=True)
            )
        )
        self._groups = (CacheGroup * (max(numbers) + 1))()  # written anew by each step
        self._fixed = {
            "final_norm": final_norm.data_ptr(),
            "hidden": shape.hidden_size,
            "groups": ctypes.addressof(self._groups),
            "num_groups": len(self._groups),
            "eps": shape.rms_norm_eps,
            "scale": shape.scale,
            "soft_cap": shape.logits_soft_cap or 0.0,
            "isa": ISAS.index(kernels.isa),
            "num_threads": kernels.num_threads,
            "kv_type": f.kv_type(fast=fast),
            "block_size": f.block_size,
            "num_heads": shape.num_heads,
            "num_kv_heads": f.num_kv_heads,
            "head_dim": f.head_dim,
            "activation": ACTIVATIONS[shape.activation],
            "all_reduce": None if self._reduction is None else self._reduction.address,
        }

    def forward(
        self,
        residual: torch.Tensor,  # [n, hidden] float32: the embeddings; holds the last layer's output afterwards
        positions: torch.Tensor,  # [n] int64, each below the rows of cos_sin
        *,
        groups: Sequence[GroupInputs],
        seq_lens: torch.Tensor,  # [num_reqs] int32
        query_start_loc: torch.Tensor,  # [num_reqs + 1] int32
        adapters: Sequence[AdaptedRows] = (),
    ) -> torch.Tensor:  # [n, hidden] float32, after the final norm
        """One step. Keys and values of its tokens are written to the caches. Rows in no part of `adapters` have none."""
        n, num_reqs = residual.shape[0], seq_lens.shape[0]
        _check(residual, "residual", torch.float32, (n, self._shape.hidden_size))
        _check(positions, "positions", torch.int64, (n,))
        _check(seq_lens, "seq_lens", torch.int32, (num_reqs,))
        _check(query_start_loc, "query_start_loc", torch.int32, (num_reqs + 1,))
        if len(groups) != len(self._groups):
            raise ValueError(f"the layers are of {len(self._groups)} KV-cache groups, got the inputs of {len(groups)}")
        for struct, group in zip(self._groups, groups, strict=True):
            _fill_group(struct, group, n=n, num_reqs=num_reqs)
        normed = torch.empty_like(residual)
        rows = self._adapters_of_rows(adapters, n) if adapters else None
        step = Step(
            residual=residual.data_ptr(),
            normed=normed.data_ptr(),
            positions=positions.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            query_start_loc=query_start_loc.data_ptr(),
            num_reqs=num_reqs,
            m=n,
            adapters=None if rows is None else ctypes.addressof(rows),
            **self._fixed,
        )
        if n and self._library.aio_decoder(self._layers, self._num_layers, step):
            assert self._reduction is not None  # nothing else answers anything
            self._reduction.raise_error()
        return normed

    def _adapters_of_rows(self, adapters: Sequence[AdaptedRows], n: int) -> ctypes.Array[ctypes.c_void_p]:
        """[n]. Raises ValueError for an adapter of another model, and rows that are not there."""
        if self._reduction is not None:
            raise ValueError("adapters are for a model in one piece, these weights are one rank's part")
        rows = (ctypes.c_void_p * n)()
        for part in adapters:
            if not 0 <= part.first <= part.end <= n:
                raise ValueError(f"rows {part.first}..{part.end} of an adapter are not among the {n} of the step")
            self._check_adapter(part.adapter)
            for row in range(part.first, part.end):
                rows[row] = part.adapter.address
        return rows

    def _check_adapter(self, adapter: PackedAdapter) -> None:
        if adapter in self._checked_adapters:
            return
        layers = self._kept[0]
        if len(adapter.shapes) != len(layers):
            raise ValueError(f"an adapter of {len(adapter.shapes)} layers does not fit a decoder of {len(layers)}")
        for layer, shapes in zip(layers, adapter.shapes, strict=True):
            for product, (rows, columns) in shapes.items():
                matrix: PackedMatrix | FusedMatrix = getattr(layer, product)
                if rows != matrix.rows or columns not in (None, matrix.columns):
                    raise ValueError(f"an adapter's {product} is [{rows}, {columns}], the decoder's is [{matrix.rows}, {matrix.columns}]")
        self._checked_adapters.add(adapter)


class _Reduction:
    """Called by the native code in the middle of a step. An exception cannot go through it, so it is kept, and the step ends."""

    def __init__(self, all_reduce: Callable[[torch.Tensor], None]) -> None:
        self._all_reduce = all_reduce
        self._error: BaseException | None = None
        self._views: dict[tuple[int, int], torch.Tensor] = {}  # by address and count: the native code writes to few places
        self._function = AllReduce(self._call)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value

    def raise_error(self) -> None:
        error, self._error = self._error, None
        assert error is not None
        raise error

    def _call(self, address: int, count: int) -> int:
        try:
            self._all_reduce(self._view(address, count))
        except BaseException as exc:
            self._error = exc
            return 1
        return 0

    def _view(self, address: int, count: int) -> torch.Tensor:
        view = self._views.get((address, count))
        if view is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            view = torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
            self._views[address, count] = view
        return view


def _check(x: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if x.dtype is not dtype or x.shape != shape or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous {dtype} {list(shape)}, got {x.dtype} {list(x.shape)}")


def _fill_group(struct: CacheGroup, group: GroupInputs, *, n: int, num_reqs: int) -> None:
    slots, table = group.slots, group.block_table
    _check(slots, "slots", torch.int64, (n,))
    if table.dtype is not torch.int32 or table.dim() != 2 or table.shape[0] < num_reqs or table.stride(1) != 1:
        raise ValueError(f"block_table must be int32 [{num_reqs}, *], got {table.dtype} {list(table.shape)}")
    struct.slots, struct.block_table, struct.block_table_stride = slots.data_ptr(), table.data_ptr(), table.stride(0)
    struct.window = group.sliding_window or 0


def _check_layer(layer: LayerWeights, shape: DecoderShape) -> None:
    f, hidden = shape.cache_format, shape.hidden_size
    heads, intermediate = shape.num_heads * f.head_dim, layer.down.columns
    wanted = {
        "qkv": (heads + 2 * f.num_kv_heads * f.head_dim, hidden),
        "output": (hidden, heads),
        "gate_up": (2 * intermediate, hidden),
        "down": (hidden, intermediate),
    }
    for name, (rows, columns) in wanted.items():
        matrix: PackedMatrix | FusedMatrix = getattr(layer, name)
        if (matrix.rows, matrix.columns) != (rows, columns):
            raise ValueError(f"{name} must be [{rows}, {columns}], got [{matrix.rows}, {matrix.columns}]")
    sizes = {f"{name}_bias": rows for name, (rows, _) in wanted.items()}
    sizes |= {"input_norm": hidden, "post_norm": hidden, "attention_out_norm": hidden, "mlp_out_norm": hidden}
    sizes |= {"query_norm": f.head_dim, "key_norm": f.head_dim}
    for field in fields(layer):
        value = getattr(layer, field.name)
        if isinstance(value, torch.Tensor):
            _check(value, field.name, torch.float32, (sizes[field.name],))


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _layer_struct(layer: LayerWeights, cache: torch.Tensor, cos_sin: torch.Tensor, *, group: int, fast: bool, kept: list[Matrix]) -> Layer:
    def matrix(m: PackedMatrix | FusedMatrix, bias: torch.Tensor | None) -> Matrix:
        parts = m.parts if isinstance(m, FusedMatrix) else (m,)
        first, following = m.rows, None
        for part in reversed(parts):
            first -= part.rows
            address = None if bias is None else bias.data_ptr() + first * bias.element_size()
            struct = Matrix(
                weights=part.data.data_ptr(), bias=address, n=part.rows, k=part.columns, format=part.format, fast=fast, next=following
            )
            kept.append(struct)
            following = ctypes.addressof(struct)
        return struct

    return Layer(
        qkv=matrix(layer.qkv, layer.qkv_bias),
        output=matrix(layer.output, layer.output_bias),
        gate_up=matrix(layer.gate_up, layer.gate_up_bias),
        down=matrix(layer.down, layer.down_bias),
        input_norm=layer.input_norm.data_ptr(),
        post_norm=layer.post_norm.data_ptr(),
        query_norm=_address(layer.query_norm),
        key_norm=_address(layer.key_norm),
        attention_out_norm=_address(layer.attention_out_norm),
        mlp_out_norm=_address(layer.mlp_out_norm),
        cos_sin=cos_sin.data_ptr(),
        cache=cache.data_ptr(),
        group=group,
    )
