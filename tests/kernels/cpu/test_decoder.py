"""A whole decoder in one call: the bits of the single operations, and close to the same in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from aioengine_kernels.cpu import CpuKernels, DecoderShape, GroupInputs, KvCacheFormat, LayerWeights, NativeDecoder
from aioengine_kernels.cpu.packing import pack_dense

Randn = Callable[..., torch.Tensor]
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM, EPS = 96, 160, 6, 2, 32, 1e-5
SHAPE = DecoderShape(HEADS, KvCacheFormat(torch.float32, 16, KV_HEADS, DIM), HIDDEN, EPS, DIM**-0.5)
GELU = replace(SHAPE, activation="gelu_tanh")


def make_layers(
    randn: Randn, *, extras: bool, sandwich: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[list[LayerWeights], list[dict[str, torch.Tensor]]]:
    qkv = (HEADS + 2 * KV_HEADS) * DIM
    shapes = {"qkv": (qkv, HIDDEN), "output": (HIDDEN, HEADS * DIM), "gate_up": (2 * INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    layers, dense = [], []
    for _ in range(3):
        matrices = {name: randn(*shape) * 0.1 for name, shape in shapes.items()}
        rest: dict[str, Any] = {"input_norm": randn(HIDDEN), "post_norm": randn(HIDDEN)}
        if extras:
            rest |= {"query_norm": randn(DIM), "key_norm": randn(DIM)}
            rest |= {f"{name}_bias": randn(shape[0]) for name, shape in shapes.items()}
        if sandwich:
            rest |= {"attention_out_norm": randn(HIDDEN), "mlp_out_norm": randn(HIDDEN)}
        packed: dict[str, Any] = {name: pack_dense(w.to(dtype)) for name, w in matrices.items()}
        layers.append(LayerWeights(**packed, **rest))
        dense.append(matrices | rest)
    return layers, dense


def single_operations(
    kernels: CpuKernels,
    layers: list[LayerWeights],
    caches: list[torch.Tensor],
    final: torch.Tensor,
    x: torch.Tensor,
    step: dict[str, Any],
    tables: list[torch.Tensor],
    positions: torch.Tensor,
    *,
    gelu: bool,
    groups: list[GroupInputs] | None = None,
) -> torch.Tensor:
    residual, f = x.clone(), SHAPE.cache_format
    normed = kernels.rms_norm(residual, layers[0].input_norm, eps=EPS)
    norms = [*(layer.input_norm for layer in layers[1:]), final]
    of_layers = groups or step["groups"] * len(layers)
    for layer, cache, norm, cos_sin, group in zip(layers, caches, norms, tables, of_layers, strict=True):
        qkv = kernels.linear(normed, layer.qkv, layer.qkv_bias).view(len(x), -1, DIM)
        query, key, value = qkv.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), dim=1)
        kernels.rope_and_cache(query, key, value, kv_cache=cache, cache_format=f, slots=group.slots, cos_sin=cos_sin, positions=positions,
                               query_norm=layer.query_norm, key_norm=layer.key_norm, norm_eps=EPS)  # fmt: skip
        batch: dict[str, Any] = {name: step[name] for name in ("seq_lens", "query_start_loc")}
        batch |= {"block_table": group.block_table, "sliding_window": group.sliding_window}
        attended = kernels.attention(query, kv_cache=cache, cache_format=f, scale=SHAPE.scale, **batch)
        out = kernels.linear(attended.view(len(x), -1), layer.output, layer.output_bias)
        if layer.attention_out_norm is not None:
            out = kernels.rms_norm(out, layer.attention_out_norm, eps=EPS)
        normed = kernels.rms_norm(out, layer.post_norm, eps=EPS, residual=residual)
        gated = (kernels.gelu_mul if gelu else kernels.silu_mul)(kernels.linear(normed, layer.gate_up, layer.gate_up_bias))
        out = kernels.linear(gated, layer.down, layer.down_bias)
        if layer.mlp_out_norm is not None:
            out = kernels.rms_norm(out, layer.mlp_out_norm, eps=EPS)
        normed = kernels.rms_norm(out, norm, eps=EPS, residual=residual)
    return normed


def reference(
    layers: list[dict[str, torch.Tensor]], final: torch.Tensor, x: torch.Tensor, tables: list[torch.Tensor], *, gelu: bool
) -> torch.Tensor:
    """One sequence from position 0, in float64 and without a cache."""
    residual, n = x.double(), len(x)

    def turn(t: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        cos, sin = table[:n, None].double().chunk(2, dim=-1)
        a, b = t.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def normed_by(name: str, out: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(out, (HIDDEN,), layer[name], EPS) if name in layer else out

    for single, table in zip(layers, tables, strict=True):
        layer = {name: w.double() for name, w in single.items()}
        normed = F.rms_norm(residual, (HIDDEN,), layer["input_norm"], EPS)
        qkv = F.linear(normed, layer["qkv"], layer.get("qkv_bias")).view(n, -1, DIM)
        query, key, value = qkv.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), dim=1)
        if "query_norm" in layer:
            query, key = F.rms_norm(query, (DIM,), layer["query_norm"], EPS), F.rms_norm(key, (DIM,), layer["key_norm"], EPS)
        q, k, v = (t.transpose(0, 1)[None] for t in (turn(query, table), turn(key, table), value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).reshape(n, -1)
        residual = residual + normed_by("attention_out_norm", F.linear(attended, layer["output"], layer.get("output_bias")))
        normed = F.rms_norm(residual, (HIDDEN,), layer["post_norm"], EPS)
        gate, up = F.linear(normed, layer["gate_up"], layer.get("gate_up_bias")).chunk(2, dim=-1)
        gated = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
        residual = residual + normed_by("mlp_out_norm", F.linear(gated, layer["down"], layer.get("down_bias")))
    return F.rms_norm(residual, (HIDDEN,), final.double(), EPS)


def make_step(first: int, last: int) -> dict[str, Any]:
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    position = torch.arange(first, last)
    return {
        "groups": [GroupInputs(table[0, position // 16].long() * 16 + position % 16, table)],
        "seq_lens": torch.tensor([last], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, last - first], dtype=torch.int32),
    }


@pytest.mark.parametrize(("extras", "gemma"), [(False, False), (True, False), (True, True)])
def test_one_call_is_the_single_operations(kernels: CpuKernels, extras: bool, gemma: bool, randn: Randn) -> None:
    """gemma: norms behind attention and MLP, GELU, and angles of its own for every other layer."""
    layers, dense = make_layers(randn, extras=extras, sandwich=gemma)
    final, cos_sin, x, shape = randn(HIDDEN), randn(64, DIM), randn(40, HIDDEN), GELU if gemma else SHAPE
    tables = [cos_sin, randn(64, DIM), cos_sin] if gemma else [cos_sin] * 3
    results = []
    for chunks in ([(0, 40)], [(0, 7), (7, 8), (8, 33), (33, 40)]):
        caches = [[torch.zeros(SHAPE.cache_format.shape(4), dtype=torch.uint8) for _ in layers] for _ in range(2)]
        angles = tables if gemma else cos_sin
        decoder = NativeDecoder(kernels, shape, layers, final_norm=final, cos_sin=angles, kv_caches=caches[0], fast=False)
        parts = []
        for first, last in chunks:
            step, positions = make_step(first, last), torch.arange(first, last)
            got = decoder.forward(x[first:last].clone(), positions, **step)
            want = single_operations(kernels, layers, caches[1], final, x[first:last], step, tables, positions, gelu=gemma)
            assert torch.equal(got, want)
            parts.append(got)
        assert all(torch.equal(a, b) for a, b in zip(*caches, strict=True))
        results.append(torch.cat(parts))
    assert torch.equal(results[0], results[1])
    want = reference(dense, final, x, tables, gelu=gemma)
    assert float((results[0].double() - want).norm() / want.norm()) < 2e-5


def test_layers_of_other_groups_share_a_cache_and_read_nothing_behind_their_window(isa: str, randn: Randn) -> None:
    """Entries behind the window are no block at all: to read there would end the process. 700 positions are several spans."""
    layers, _ = make_layers(randn, extras=True)
    layer_groups, num_blocks, total, window = [0, 1, 0], 45, 700, 300
    final, cos_sin, x = randn(HIDDEN), randn(total, DIM), randn(total, HIDDEN)
    tables = torch.randperm(2 * num_blocks).int().view(2, 1, num_blocks)
    results = []
    for chunks in ([(0, total)], [(0, 333), (333, 334), (334, 690), *((i, i + 1) for i in range(690, total))]):
        caches, apart = (
            [torch.zeros(SHAPE.cache_format.shape(2 * num_blocks), dtype=torch.uint8) for _ in range(count)] for count in (2, 3)
        )
        kernels = CpuKernels(isa=isa, num_threads=2)
        shared = [caches[0], caches[0], caches[1]]
        decoder = NativeDecoder(
            kernels, SHAPE, layers, final_norm=final, cos_sin=cos_sin, kv_caches=shared, layer_groups=layer_groups, fast=False
        )
        for first, last in chunks:
            position = torch.arange(first, last)
            seen = tables.clone()
            seen[1, 0, : max(0, first - window + 1) // 16] = 2**30
            groups = [
                GroupInputs(table[0, position // 16].long() * 16 + position % 16, table, limit)
                for table, limit in zip(seen, (None, window), strict=True)
            ]
            step = {**make_step(0, 1), "groups": groups}
            step |= {"seq_lens": torch.tensor([last]).int(), "query_start_loc": torch.tensor([0, last - first]).int()}
            got = decoder.forward(x[first:last].clone(), position, **step)
            of_layers = [groups[group] for group in layer_groups]
            tables_of_angles = [cos_sin] * 3
            want = single_operations(
                kernels, layers, apart, final, x[first:last], step, tables_of_angles, position, gelu=False, groups=of_layers
            )
            assert torch.equal(got, want)
        results.append(got[-1])
    assert torch.equal(*results)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.int8])
def test_threads_share_a_step_without_a_trace(isa: str, kv_dtype: torch.dtype, randn: Randn) -> None:
    """With many rows each thread takes its own, and its share may begin and end inside a request, or read what another writes."""
    layers, _ = make_layers(randn, extras=True, sandwich=True)
    shape = DecoderShape(HEADS, KvCacheFormat(kv_dtype, 16, KV_HEADS, DIM), HIDDEN, EPS, DIM**-0.5)
    final, cos_sin = randn(HIDDEN), randn(64, DIM)
    # Requests of 1 row after 20 others, of 30 rows from the first on, ..., and the last reads the block that the one before it fills.
    lengths, before = [1, 30, 2, 1, 17, 1, 16, 7], [20, 0, 5, 30, 0, 40, 0, 16]
    table = torch.arange(len(lengths) * 3, dtype=torch.int32).view(-1, 3)
    table[7, 0] = table[6, 0]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    positions = torch.cat([torch.arange(known, known + n) for n, known in zip(lengths, before, strict=True)])
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    step: dict[str, Any] = {
        "groups": [GroupInputs(table[rows, positions // 16].long() * 16 + positions % 16, table)],
        "seq_lens": torch.tensor(lengths, dtype=torch.int32) + torch.tensor(before, dtype=torch.int32),
        "query_start_loc": starts,
    }
    x, full = randn(len(rows), HIDDEN), [torch.zeros(shape.cache_format.shape(24), dtype=torch.uint8) for _ in layers]
    results = []
    for num_threads in (1, 2, 3):
        caches, kernels = [cache.clone() for cache in full], CpuKernels(isa=isa, num_threads=num_threads)
        decoder = NativeDecoder(kernels, shape, layers, final_norm=final, cos_sin=cos_sin, kv_caches=caches, fast=True)
        results.append([decoder.forward(x.clone(), positions, **step), *caches])
    assert results[0][0].isfinite().all()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_shapes_are_checked(kernels: CpuKernels, randn: Randn) -> None:
    layers, _ = make_layers(randn, extras=False)
    caches = [torch.zeros(SHAPE.cache_format.shape(4), dtype=torch.uint8) for _ in layers]
    final, cos_sin = randn(HIDDEN), randn(64, DIM)
    with pytest.raises(ValueError, match="3 layers and 2 caches"):
        NativeDecoder(kernels, SHAPE, layers, final_norm=final, cos_sin=cos_sin, kv_caches=caches[1:], fast=False)
    with pytest.raises(ValueError, match=r"final_norm must be contiguous torch.float32 \[96\]"):
        NativeDecoder(kernels, SHAPE, layers, final_norm=final[1:], cos_sin=cos_sin, kv_caches=caches, fast=False)
    with pytest.raises(ValueError, match="one for each of 3 layers, got 2"):
        NativeDecoder(kernels, SHAPE, layers, final_norm=final, cos_sin=[cos_sin] * 2, kv_caches=caches, fast=False)
    decoder = NativeDecoder(kernels, SHAPE, layers, final_norm=final, cos_sin=cos_sin, kv_caches=caches, fast=False)
    with pytest.raises(ValueError, match="the layers are of 1 KV-cache groups, got the inputs of 2"):
        decoder.forward(randn(3, HIDDEN), torch.arange(3), **{**make_step(0, 3), "groups": make_step(0, 3)["groups"] * 2})
    with pytest.raises(ValueError, match=r"layer_groups must be 3 numbers from 0 on, one a layer, got \[0, 1\]"):
        NativeDecoder(kernels, SHAPE, layers, final_norm=final, cos_sin=cos_sin, kv_caches=caches, layer_groups=[0, 1], fast=False)
    with pytest.raises(ValueError, match="positions"):
        decoder.forward(randn(3, HIDDEN), torch.arange(2), **make_step(0, 3))
