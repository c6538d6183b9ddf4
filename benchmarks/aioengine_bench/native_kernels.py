"""The native CPU kernels as variants of the cases in `kernel_cases`. Empty where the library is not there."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aioengine_bench.kernel_case import BLOCK_SIZE, CONTEXT, Inputs, KernelCase, Op, Variant
from aioengine_kernels.compile_report import ModelShape
from aioengine_kernels.cpu import CpuKernels, KvCacheFormat, load_kernels, status
from aioengine_kernels.cpu.bench import TOLERANCE, random_matrix
from aioengine_kernels.cpu.packing import PackedMatrix, gather_rows, pack_dense

FLOAT32, HALF = TOLERANCE["float32"], 2e-3


def native_variants(shape: ModelShape) -> dict[str, dict[str, Variant]]:
    """op -> variants by name."""
    if status() is not None:
        return {}
    kernels = load_kernels()
    return {
        "linear gate_up": {"native f32": Variant(_linear(kernels), FLOAT32)},
        "rms_norm": {"native": Variant(_rms_norm(kernels), FLOAT32)},
        "silu_mul": {"native": Variant(lambda i: (kernels.silu_mul(i["x"]),), FLOAT32)},
        f"paged_attention ctx {CONTEXT}": {
            f"native {name}": Variant(_attention(kernels, shape, dtype), tolerance)
            for name, dtype, tolerance in (("f32 KV", torch.float32, FLOAT32), ("f16 KV", torch.float16, HALF))
        },
    }


def _rms_norm(kernels: CpuKernels) -> Op:
    return lambda i: (kernels.rms_norm(i["x"], i["weight"], eps=1e-5, residual=i["residual"]), i["residual"])


def _linear(kernels: CpuKernels) -> Op:
    """Dense weights in the native layout, packed once, as at load time."""
    packed: list[PackedMatrix] = []

    def op(i: Inputs) -> tuple[torch.Tensor, ...]:
        if not packed:
            packed.append(pack_dense(i["weight"]))
        return (kernels.linear(i["x"], packed[0]),)

    return op


def _attention(kernels: CpuKernels, shape: ModelShape, dtype: torch.dtype) -> Op:
    """The cache in the native layout, written once from the case's."""
    cache_format = KvCacheFormat(dtype, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    caches: list[torch.Tensor] = []

    def op(i: Inputs) -> tuple[torch.Tensor, ...]:
        if not caches:
            keys, values = (i[name].flatten(0, 1).contiguous() for name in ("key_cache", "value_cache"))
            cache = torch.zeros(cache_format.shape(i["key_cache"].shape[0]), dtype=torch.uint8)
            slots = torch.arange(len(keys))
            query = torch.empty(len(keys), shape.num_heads, shape.head_dim)
            kernels.rope_and_cache(query, keys, values, kv_cache=cache, cache_format=cache_format, slots=slots)
            caches.append(cache)
        out = kernels.attention(
            i["query"],
            kv_cache=caches[0],
            cache_format=cache_format,
            block_table=i["block_table"],
            seq_lens=i["seq_lens"],
            query_start_loc=i["query_start_loc"],
            scale=shape.head_dim**-0.5,
        )
        return (out,)

    return op


def native_cases(shape: ModelShape, num_tokens: int) -> list[KernelCase]:
    """Products on packed 4-bit weights, against `F.linear` on the same weights in float32: exact, and with int8 activations."""
    if status() is not None:
        return []
    kernels = load_kernels()
    rows, columns = 2 * shape.intermediate_size, shape.hidden_size
    packed = random_matrix("Q4_1", rows, columns, torch.Generator().manual_seed(0))
    dense = gather_rows(packed, torch.arange(rows))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, columns, generator=generator)
    return [
        KernelCase(
            "linear gate_up Q4_1",
            num_tokens,
            lambda: {"x": x.clone(), "weight": dense},
            lambda i: (F.linear(i["x"], i["weight"]),),
            {
                "native exact": Variant(lambda i: (kernels.linear(i["x"], packed),), TOLERANCE["exact"]),
                "native fast": Variant(lambda i: (kernels.linear(i["x"], packed, fast=True),), TOLERANCE["fast"]),
            },
            packed.data.numel() + 4 * num_tokens * (rows + columns),
            2.0 * num_tokens * rows * columns,
        )
    ]
