"""The operations, checked, on torch tensors.

Plain functions rather than torch.library custom ops: dispatching a custom op costs several times what the call itself
does (README.md), and nothing here is traced or differentiated. ctypes releases the GIL during every call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioengine_kernels.cpu.abi import AttentionArgs, CacheLayout, GatedMulArgs, LinearArgs, RmsNormArgs, RopeCacheArgs
from aioengine_kernels.cpu.library import ISAS, choose_isa, open_library
from aioengine_kernels.cpu.packing import FusedMatrix, PackedMatrix

KV_TYPES = {torch.float32: 0, torch.float16: 1, torch.int8: 2}
_FLOAT16_IN_BF16 = 3


@dataclass(frozen=True, slots=True)
class KvCacheFormat:
    """One layer's cache: [num_blocks, num_kv_heads, 2, bytes_per_part] uint8, keys then values.

    Keys of a block and head are [head_dim, block_size], values [block_size, head_dim], in `dtype`; for int8 each part is followed
    by block_size float32 scales.
    """

    dtype: torch.dtype  # float32, float16 or int8
    block_size: int
    num_kv_heads: int
    head_dim: int

    @staticmethod
    def why_not(dtype: torch.dtype, block_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> str | None:
        """None if the native attention can serve these shapes, else the reason."""
        if dtype not in KV_TYPES:
            return f"no KV cache of {dtype}"
        if block_size % 16:
            return f"block_size ({block_size}) is not a multiple of 16"
        if head_dim % 16:
            return f"head_dim ({head_dim}) is not a multiple of 16"
        if num_heads % num_kv_heads:
            return f"num_heads ({num_heads}) is not a multiple of num_kv_heads ({num_kv_heads})"
        return None

    def kv_type(self, *, fast: bool) -> int:
        """The number in the C ABI. fast: float16 keys and values are multiplied in bfloat16 where the CPU can."""
        return _FLOAT16_IN_BF16 if fast and self.dtype == torch.float16 else KV_TYPES[self.dtype]

    @property
    def bytes_per_part(self) -> int:
        return self.block_size * (self.head_dim * self.dtype.itemsize + (4 if self.dtype == torch.int8 else 0))

    @property
    def bytes_per_block(self) -> int:
        return self.num_kv_heads * 2 * self.bytes_per_part

    def shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        return (num_blocks, self.num_kv_heads, 2, self.bytes_per_part)


def _check_rows(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    """float32 of this shape, with the dimensions after the first contiguous."""
    if x.dtype is not torch.float32 or x.shape != shape or x.device.type != "cpu":
        raise ValueError(f"{name} must be float32 {list(shape)} on the CPU, got {x.dtype} {list(x.shape)} on {x.device}")
    size = 1
    for dim in range(x.dim() - 1, 0, -1):
        if x.stride(dim) != size and x.shape[dim] > 1:
            raise ValueError(f"{name}: dimensions after the first must be contiguous, got strides {list(x.stride())}")
        size *= shape[dim]


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _cache_layout(kv_cache: torch.Tensor, f: KvCacheFormat, *, fast: bool = False) -> CacheLayout:
    return CacheLayout(
        kv_type=f.kv_type(fast=fast),
        block_size=f.block_size,
        num_kv_heads=f.num_kv_heads,
        head_dim=f.head_dim,
        data=kv_cache.data_ptr(),
    )


class CpuKernels:
    """The operations for one instruction set and number of threads. Holds no weights and no state.

    Results do not depend on the number of threads, nor any row's on the other rows of a call; they may differ between
    instruction sets.
    """

    def __init__(self, *, isa: str | None = None, num_threads: int | None = None) -> None:
        """isa: see `choose_isa`. num_threads: torch's number by default. Raises RuntimeError without the library."""
        self._library = open_library()
        self.isa = choose_isa(isa)
        self._isa = ISAS.index(self.isa)
        self.num_threads = num_threads or torch.get_num_threads()

    def linear(
        self,
        x: torch.Tensor,  # [m, columns] float32
        weight: PackedMatrix | FusedMatrix,
        bias: torch.Tensor | None = None,  # [rows] float32
        *,
        fast: bool = False,
        out: torch.Tensor | None = None,  # [m, rows] float32, contiguous
    ) -> torch.Tensor:  # [m, rows] float32
        """x W^T + b. Exact: to float32's accuracy (README.md, Arithmetic). Fast: x rounded to int8 with a scale for every 32 columns.

        `fast` means nothing for dense weights.
        """
        m = x.shape[0]
        _check_rows("x", x, (m, weight.columns))
        if bias is not None:
            _check_rows("bias", bias, (weight.rows,))
        if out is None:
            out = torch.empty((m, weight.rows))
        elif out.dtype is not torch.float32 or out.shape != (m, weight.rows) or not out.is_contiguous():
            raise ValueError(f"out must be contiguous float32 {[m, weight.rows]}, got {out.dtype} {list(out.shape)}")
        first = 0
        for part in weight.parts if isinstance(weight, FusedMatrix) else (weight,):
            args = LinearArgs(
                isa=self._isa,
                fast=fast,
                format=part.format,
                num_threads=self.num_threads,
                m=m,
                n=part.rows,
                k=part.columns,
                weights=part.data.data_ptr(),
                x=x.data_ptr(),
                ldx=x.stride(0),
                y=out.data_ptr() + first * out.element_size(),
                ldy=weight.rows,
                bias=None if bias is None else bias.data_ptr() + first * bias.element_size(),
            )
            self._library.aio_linear(args)
            first += part.rows
        return out

    def find_largest(
        self,
        x: torch.Tensor,  # [m, columns] float32
        weight: PackedMatrix,
        *,
        norms: torch.Tensor,  # [rows] float32: none below the norm of the row's weights
        largest_norm: float,
        scores: torch.Tensor,  # [m, rows] float32, contiguous; overwritten
        out: torch.Tensor,  # [m] int64, contiguous: the column with the largest number of each row of x W^T, the first of equal ones
    ) -> bool:
        """False, with nothing of use in `out`, if only the exact product can tell. See `greedy.GreedyHead`."""
        m = x.shape[0]
        _check_rows("x", x, (m, weight.columns))
        _check_rows("norms", norms, (weight.rows,))
        _check_rows("scores", scores, (m, weight.rows))
        if (
            out.dtype is not torch.int64
            or out.shape != (m,)
            or not (out.is_contiguous() and norms.is_contiguous() and scores.is_contiguous())
        ):
            raise ValueError(f"out must be int64 [{m}], and all results contiguous; got {out.dtype} {list(out.shape)}")
        args = LinearArgs(
            isa=self._isa,
            fast=True,
            format=weight.format,
            num_threads=self.num_threads,
            m=m,
            n=weight.rows,
            k=weight.columns,
            weights=weight.data.data_ptr(),
            x=x.data_ptr(),
            ldx=x.stride(0),
            y=scores.data_ptr(),
            ldy=weight.rows,
        )
        return bool(self._library.aio_greedy(args, norms.data_ptr(), largest_norm, out.data_ptr()))

    def rms_norm(
        self,
        x: torch.Tensor,  # [m, n] float32
        weight: torch.Tensor,  # [n] float32
        *,
        eps: float,
        residual: torch.Tensor | None = None,  # [m, n] float32, updated in place
    ) -> torch.Tensor:  # [m, n] float32
        """Without a residual: norm(x). With one: residual += x, then norm(residual)."""
        m, n = x.shape
        _check_rows("x", x, (m, n))
        _check_rows("weight", weight, (n,))
        if residual is not None:
            _check_rows("residual", residual, (m, n))
        out = torch.empty((m, n))
        args = RmsNormArgs(
            isa=self._isa,
            num_threads=self.num_threads,
            m=m,
            n=n,
            x=x.data_ptr(),
            ldx=x.stride(0),
            residual=_address(residual),
            ldr=0 if residual is None else residual.stride(0),
            weight=weight.data_ptr(),
            y=out.data_ptr(),
            ldy=n,
            eps=eps,
        )
        self._library.aio_rms_norm(args)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [m, 2n] float32, the gate first -> silu(gate) * up [m, n]."""
        args, out = self._gated_args(gate_up)
        self._library.aio_silu_mul(args)
        return out

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [m, 2n] float32, the gate first -> gelu(gate) * up [m, n], with GELU's tanh approximation."""
        args, out = self._gated_args(gate_up)
        self._library.aio_gelu_mul(args)
        return out

    def _gated_args(self, gate_up: torch.Tensor) -> tuple[GatedMulArgs, torch.Tensor]:
        m, n = gate_up.shape[0], gate_up.shape[1] // 2
        _check_rows("gate_up", gate_up, (m, 2 * n))
        out = torch.empty((m, n))
        args = GatedMulArgs(
            isa=self._isa,
            num_threads=self.num_threads,
            m=m,
            n=n,
            gate_up=gate_up.data_ptr(),
            ldx=gate_up.stride(0),
            y=out.data_ptr(),
            ldy=n,
        )
        return args, out

    def rope_and_cache(
        self,
        query: torch.Tensor,  # [n, num_heads, head_dim] float32, rotated in place
        key: torch.Tensor,  # [n, num_kv_heads, head_dim] float32, rotated in place
        value: torch.Tensor,  # [n, num_kv_heads, head_dim] float32
        *,
        kv_cache: torch.Tensor,
        cache_format: KvCacheFormat,
        slots: torch.Tensor,  # [n] int64: block * block_size + offset; negative: not written
        cos_sin: torch.Tensor | None = None,  # [positions, head_dim] float32, cosines then sines; None: no rotation
        positions: torch.Tensor | None = None,  # [n] int64
        query_norm: torch.Tensor | None = None,  # [head_dim] float32: RMS norm of each head before the rotation
        key_norm: torch.Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> None:
        """Rotary embedding ("rotate half") of queries and keys, and the write of keys and values to the paged cache."""
        n, num_heads, dim = query.shape
        f = cache_format
        _check_rows("query", query, (n, num_heads, f.head_dim))
        _check_rows("key", key, (n, f.num_kv_heads, dim))
        _check_rows("value", value, (n, f.num_kv_heads, dim))
        self._check_cache(kv_cache, f, num_heads)
        if slots.dtype is not torch.int64 or slots.shape != (n,) or not slots.is_contiguous():
            raise ValueError(f"slots must be contiguous int64 [{n}], got {slots.dtype} {list(slots.shape)}")
        if cos_sin is not None:
            _check_rows("cos_sin", cos_sin, (cos_sin.shape[0], dim))
            if positions is None or positions.dtype is not torch.int64 or positions.shape != (n,) or not positions.is_contiguous():
                raise ValueError(f"with cos_sin, positions must be contiguous int64 [{n}]")
            if not cos_sin.is_contiguous():
                raise ValueError("cos_sin must be contiguous")
        for name, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
            if norm is not None:
                _check_rows(name, norm, (dim,))
        args = RopeCacheArgs(
            cache=_cache_layout(kv_cache, f),
            isa=self._isa,
            num_heads=num_heads,
            num_threads=self.num_threads,
            num_tokens=n,
            query=query.data_ptr(),
            query_stride=query.stride(0),
            key=key.data_ptr(),
            key_stride=key.stride(0),
            value=value.data_ptr(),
            value_stride=value.stride(0),
            cos_sin=_address(cos_sin),
            positions=_address(positions),
            slots=slots.data_ptr(),
            query_norm=_address(query_norm),
            key_norm=_address(key_norm),
            norm_eps=norm_eps,
        )
        self._library.aio_rope_cache(args)

    def attention(
        self,
        query: torch.Tensor,  # [n, num_heads, head_dim] float32
        *,
        kv_cache: torch.Tensor,
        cache_format: KvCacheFormat,
        block_table: torch.Tensor,  # [num_reqs, max_blocks] int32; entries past a request's blocks are never read
        seq_lens: torch.Tensor,  # [num_reqs] int32, this step's tokens included
        query_start_loc: torch.Tensor,  # [num_reqs + 1] int32
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        fast: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # [n, num_heads, head_dim] float32
        """Causal attention of each request's last rows over its cached positions. Slots that no request owns are never read.

        fast: see `KvCacheFormat.kv_type`.
        """
        n, num_heads, dim = query.shape
        f = cache_format
        num_reqs = seq_lens.shape[0]
        _check_rows("query", query, (n, num_heads, f.head_dim))
        self._check_cache(kv_cache, f, num_heads)
        for name, x, size in (("seq_lens", seq_lens, num_reqs), ("query_start_loc", query_start_loc, num_reqs + 1)):
            if x.dtype is not torch.int32 or x.shape != (size,) or not x.is_contiguous():
                raise ValueError(f"{name} must be contiguous int32 [{size}], got {x.dtype} {list(x.shape)}")
        if block_table.dtype is not torch.int32 or block_table.dim() != 2 or block_table.shape[0] < num_reqs or block_table.stride(1) != 1:
            raise ValueError(f"block_table must be int32 [{num_reqs}, *], got {block_table.dtype} {list(block_table.shape)}")
        if out is None:
            out = torch.empty((n, num_heads, dim))
        else:
            _check_rows("out", out, (n, num_heads, dim))
        args = AttentionArgs(
            cache=_cache_layout(kv_cache, f, fast=fast),
            isa=self._isa,
            num_heads=num_heads,
            num_threads=self.num_threads,
            query=query.data_ptr(),
            query_stride=query.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            block_table=block_table.data_ptr(),
            block_table_stride=block_table.stride(0),
            seq_lens=seq_lens.data_ptr(),
            query_start_loc=query_start_loc.data_ptr(),
            num_reqs=num_reqs,
            window=sliding_window or 0,
            scale=scale,
            soft_cap=soft_cap or 0.0,
        )
        self._library.aio_attention(args)
        return out

    @staticmethod
    def _check_cache(kv_cache: torch.Tensor, f: KvCacheFormat, num_heads: int) -> None:
        reason = KvCacheFormat.why_not(f.dtype, f.block_size, num_heads, f.num_kv_heads, f.head_dim)
        if reason is not None:
            raise ValueError(reason)
        if kv_cache.dtype is not torch.uint8 or kv_cache.shape != f.shape(kv_cache.shape[0]) or not kv_cache.is_contiguous():
            shape = f.shape(kv_cache.shape[0])
            raise ValueError(f"kv_cache must be contiguous uint8 {list(shape)}, got {kv_cache.dtype} {list(kv_cache.shape)}")


def load_kernels(*, isa: str | None = None, num_threads: int | None = None) -> CpuKernels:
    """The kernels for this machine. Raises RuntimeError with the text of `status()` where there are none."""
    return CpuKernels(isa=isa, num_threads=num_threads)
