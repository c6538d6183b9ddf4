"""The Triton kernels on the device that is there: every one against its reference.

Run by `benchmarks/gpu_check.py`. The references run in float64 on the same device, or compare exactly where nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from aioengine_kernels.activation import gelu_mul, gelu_mul_ref, silu_mul, silu_mul_ref
from aioengine_kernels.batch_inputs import BatchInputs, RequestTables, StepRows, batch_inputs, batch_inputs_ref
from aioengine_kernels.draw_tokens import draw_tokens, draw_tokens_ref
from aioengine_kernels.logprobs import token_logprobs, token_logprobs_ref
from aioengine_kernels.paged_attention import paged_attention, paged_attention_ref
from aioengine_kernels.penalties import apply_penalties, apply_penalties_ref
from aioengine_kernels.qk_norm_rope_cache import qk_norm_rope_cache, qk_norm_rope_cache_ref
from aioengine_kernels.reshape_and_cache import reshape_and_cache, reshape_and_cache_ref
from aioengine_kernels.rms_norm import rms_norm, rms_norm_ref
from aioengine_kernels.rope import apply_rope, apply_rope_ref, build_cos_sin_cache, inverse_frequencies
from aioengine_kernels.top_k_top_p import top_k_top_p, top_k_top_p_ref
from aioengine_kernels.write_rows import write_rows, write_rows_ref
from aioengine_kernels.zero_blocks import zero_blocks, zero_blocks_ref

BLOCK_SIZE = 16
TOLERANCES = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """How far one kernel's output is from its reference's."""

    name: str
    error: float  # the largest absolute difference, or the number of entries that differ
    limit: float
    passed: bool
    message: str = ""  # what was raised


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the inputs of the checks are; the small ones are for rehearsing in Triton's interpreter."""

    head_dims: tuple[int, ...] = (64, 80, 128, 256)
    vocab_size: int = 151936
    long_context: int = 5000
    hidden_size: int = 4096
    dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCES)
    heads: tuple[int, int] = (32, 8)


def check_kernels(device: torch.device, sizes: Sizes) -> Iterator[KernelCheck]:
    """Every kernel once or more; a check that raises is a failed one."""
    for name, limit, check in _checks(device, sizes):
        torch.manual_seed(0)
        try:
            error = check()
        except Exception as exc:  # whatever a compiler or a device comes up with: the others are still worth a look
            yield KernelCheck(name, float("nan"), limit, passed=False, message=f"{type(exc).__name__}: {exc}"[:2000])
        else:
            yield KernelCheck(name, error, limit, passed=error <= limit)


Check = tuple[str, float, Callable[[], float]]


def _checks(device: torch.device, sizes: Sizes) -> Iterator[Check]:
    yield "batch_inputs", 0, partial(_batch_inputs, device)
    yield "write_rows", 0, partial(_write_rows, device)
    yield "reshape_and_cache bfloat16", 0, partial(_reshape_and_cache, device, torch.bfloat16)
    yield "zero_blocks", 0, partial(_zero_blocks, device)
    for dtype in sizes.dtypes:
        limit, name, heads = TOLERANCES[dtype], str(dtype).removeprefix("torch."), sizes.heads
        # Without tensor cores the compiler unrolls products: float32 takes it up to 20 s a head size.
        for head_dim in sizes.head_dims[:1] if dtype == torch.float32 else sizes.head_dims:
            yield f"paged_attention {name} mixed d{head_dim}", limit, partial(_attention, device, dtype, head_dim, MIXED, heads=heads)
        decodes = [(1, sizes.long_context), (1, 700), (1, 0)]
        yield f"paged_attention {name} split decodes", limit, partial(_attention, device, dtype, 128, decodes, heads=heads)
        yield f"paged_attention {name} window, cap", limit, partial(_attention, device, dtype, 64, MIXED, heads=heads, window=24, cap=30.0)
        yield f"paged_attention {name} 9 heads on 3", limit, partial(_attention, device, dtype, 64, MIXED, heads=(9, 3))
        yield f"rms_norm {name}", limit, partial(_rms_norm, device, dtype, sizes.hidden_size)
        yield f"rope {name}", limit, partial(_rope, device, dtype)
        yield f"silu_mul {name}", limit, partial(_activation, device, dtype, silu_mul, silu_mul_ref)
        yield f"gelu_mul {name}", limit, partial(_activation, device, dtype, gelu_mul, gelu_mul_ref)
        yield f"qk_norm_rope_cache {name}", limit, partial(_qk_norm_rope_cache, device, dtype)
    yield "apply_penalties", 1e-4, partial(_penalties, device, sizes.vocab_size)
    # Float32 sums may disagree with float64 ones about the token on which the mass of top-p is reached.
    yield "top_k_top_p", 1, partial(_top_k_top_p, device, sizes.vocab_size)
    yield "draw_tokens", 0.0, partial(_draw_tokens, device, sizes.vocab_size)
    yield "token_logprobs", 1e-4, partial(_logprobs, device, sizes.vocab_size)
    for name, values in NO_LOGITS.items():
        yield f"sampling kernels beside a row of {name}", 0, partial(_beside, device, sizes.vocab_size, values)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, of values beyond 1 relative to them: a rounding is."""
    wide = expected.double()
    return ((actual.double() - wide).abs() / (1 + wide.abs())).max().item()


def _num_different(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.cpu() != expected.cpu()).sum())


def _int32(*values: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _batch_inputs(device: torch.device) -> float:
    def make(where: torch.device) -> tuple[RequestTables, StepRows, BatchInputs]:
        generator = torch.Generator().manual_seed(1)
        token_table = torch.randint(5, 1000, (6, 640), generator=generator, dtype=torch.int32)
        for slot, known in ((4, 30), (0, 60), (3, 40), (5, 600)):
            token_table[slot, known:] = -1
        tables = RequestTables(
            token_table.to(where),
            torch.randperm(480, generator=generator).view(2, 6, 40).int().to(where),
            _int32(-1, -1, -1, -1, 777, -1, device=where),
        )
        rows = StepRows(
            _int32(4, 0, 3, 5, device=where),
            _int32(0, 1, 18, 19, 619, device=where),
            _int32(30, 16, 12, 0, device=where),
            _int32(30, 60, 40, 600, device=where),
            _int32(0, 31, 31, 44, 44, 0, 8, 8, 16, 16, device=where).view(2, 5),
            _int32(256, 32, device=where),
        )
        longs = [torch.full(shape, -9, device=where) for shape in ((640,), (640,), (2, 640))]
        ints = torch.full((6,), -9, dtype=torch.int32, device=where)
        blocks, starts, segment_lens = (torch.full(shape, -9, dtype=torch.int32, device=where) for shape in ((2, 6, 40), (2, 8), (2, 4)))
        last = torch.full((6,), -9, device=where)
        return tables, rows, BatchInputs(longs[0], longs[1], longs[2], ints, last, blocks, starts[:, :7], segment_lens[:, :1])

    (tables, rows, out), (tables_ref, rows_ref, out_ref) = make(device), make(torch.device("cpu"))
    batch_inputs(tables, rows, out, block_size=BLOCK_SIZE, max_query_len=600)
    batch_inputs_ref(tables_ref, rows_ref, out_ref, block_size=BLOCK_SIZE)
    wrong = sum(_num_different(getattr(out, field.name), getattr(out_ref, field.name)) for field in fields(BatchInputs))
    return wrong + _num_different(tables.token_table, tables_ref.token_table)


def _write_rows(device: torch.device) -> float:
    pieces = torch.tensor([[2, 0, 2500, 0], [0, 2999, 1, 2500], [3, 1000, 99, 2501]], dtype=torch.int32)
    values, expected = torch.arange(2600, dtype=torch.int32), torch.full((4, 3000), -9, dtype=torch.int32)
    table = expected.to(device)
    write_rows(table, pieces.to(device), values.to(device), max_length=2500)
    write_rows_ref(expected, pieces, values)
    return _num_different(table, expected)


def _reshape_and_cache(device: torch.device, dtype: torch.dtype) -> float:
    key, value = torch.randn(33, 8, 128, device=device), torch.randn(33, 8, 128, device=device)
    slots = torch.randperm(20 * BLOCK_SIZE, device=device)[:33]
    slots[5] = -1
    cache = torch.zeros(20, 2, BLOCK_SIZE, 8, 128, dtype=dtype, device=device)
    expected = cache.clone()
    reshape_and_cache(key, value, key_cache=cache[:, 0], value_cache=cache[:, 1], slot_mapping=slots)
    reshape_and_cache_ref(key, value, key_cache=expected[:, 0], value_cache=expected[:, 1], slot_mapping=slots)
    return _num_different(cache, expected)


def _zero_blocks(device: torch.device) -> float:
    cache = torch.ones(20, 2, BLOCK_SIZE, 8, 64, dtype=torch.bfloat16, device=device)
    expected, ids = cache.clone(), _int32(3, 19, -1, device=device)
    zero_blocks(cache, ids)
    zero_blocks_ref(expected, ids)
    return _num_different(cache, expected)


# (query tokens, cached positions before them): decodes, whole prompts, chunks, block and tile boundaries.
MIXED = [(1, 127), (7, 0), (1, 0), (133, 15), (0, 20), (5, 16), (1, 31), (16, 47)]


def _attention(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    requests: list[tuple[int, int]],
    *,
    heads: tuple[int, int],
    window: int | None = None,
    cap: float | None = None,
) -> float:
    """NaN in every slot that no request owns; the output is filled with NaN first."""
    seq_lens = [query + context for query, context in requests]
    needed = [-(-length // BLOCK_SIZE) for length in seq_lens]
    order = torch.randperm(sum(needed) + 3, device=device).int()
    table = torch.full((len(requests), max(needed) + 1), 10**6, dtype=torch.int32, device=device)
    cache = torch.full((len(order), 2, BLOCK_SIZE, heads[1], head_dim), torch.nan, dtype=dtype, device=device)
    used = 0
    for i, (count, length) in enumerate(zip(needed, seq_lens, strict=True)):
        table[i, :count] = order[used : used + count]
        used += count
        positions = torch.arange(length, device=device)
        content = torch.randn(length, 2, heads[1], head_dim, device=device).to(dtype)
        cache.transpose(1, 2)[table[i, positions // BLOCK_SIZE].long(), positions % BLOCK_SIZE] = content
    starts = torch.tensor([0, *(query for query, _ in requests)], device=device).cumsum(0).int()
    query = torch.randn(int(starts[-1]), heads[0], head_dim, device=device).to(dtype)
    common: dict[str, Any] = {"block_table": table, "seq_lens": _int32(*seq_lens, device=device), "query_start_loc": starts}
    actual = paged_attention(
        query,
        key_cache=cache[:, 0],
        value_cache=cache[:, 1],
        max_query_len=max(query_len for query_len, _ in requests),
        max_seq_len=max(seq_lens),
        scale=head_dim**-0.5,
        sliding_window=window,
        logits_soft_cap=cap,
        out=torch.full_like(query, torch.nan),
        **common,
    )
    wide = cache.double()
    expected = paged_attention_ref(
        query.double(),
        key_cache=wide[:, 0],
        value_cache=wide[:, 1],
        scale=head_dim**-0.5,
        sliding_window=window,
        logits_soft_cap=cap,
        **common,
    )
    return _difference(actual, expected)


def _rms_norm(device: torch.device, dtype: torch.dtype, hidden_size: int) -> float:
    x, residual = (torch.randn(37, hidden_size, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(hidden_size, device=device).to(dtype)
    expected_residual = residual.double()
    expected = rms_norm_ref(x.double(), weight.double(), eps=1e-5, residual=expected_residual)
    actual = rms_norm(x, weight, eps=1e-5, residual=residual)
    return max(_difference(actual, expected), _difference(residual, expected_residual))


def _angles(device: torch.device, rotary_dim: int) -> torch.Tensor:
    return build_cos_sin_cache(inverse_frequencies(rotary_dim, theta=5e5), max_position=8192, device=device)


def _rope(device: torch.device, dtype: torch.dtype) -> float:
    query, key = torch.randn(37, 32, 128, device=device).to(dtype), torch.randn(37, 8, 128, device=device).to(dtype)
    positions = torch.randint(0, 8192, (37,), device=device)
    expected = query.double(), key.double()
    apply_rope_ref(*expected, positions=positions, cos_sin_cache=_angles(device, 128))
    apply_rope(query, key, positions=positions, cos_sin_cache=_angles(device, 128))
    return max(_difference(query, expected[0]), _difference(key, expected[1]))


def _activation(
    device: torch.device, dtype: torch.dtype, op: Callable[[torch.Tensor], torch.Tensor], ref: Callable[[torch.Tensor], torch.Tensor]
) -> float:
    x = torch.randn(37, 2 * 3072, device=device).to(dtype)
    return _difference(op(x), ref(x.double()))


def _qk_norm_rope_cache(device: torch.device, dtype: torch.dtype) -> float:
    qkv = torch.randn(37, (16 + 16) * 128, device=device).to(dtype)
    positions = torch.randint(0, 8192, (37,), device=device)
    slots = torch.randperm(20 * BLOCK_SIZE, device=device)[:37]
    slots[3] = -1
    weights = [torch.rand(128, device=device).to(dtype) for _ in range(2)]
    outputs = []
    for op, wide in ((qk_norm_rope_cache, dtype), (qk_norm_rope_cache_ref, torch.float64)):
        cache = torch.zeros(20, 2, BLOCK_SIZE, 8, 128, dtype=wide, device=device)
        query = op(
            qkv.to(wide),
            num_heads=16,
            positions=positions,
            cos_sin_cache=_angles(device, 128),
            key_cache=cache[:, 0],
            value_cache=cache[:, 1],
            slot_mapping=slots,
            query_weight=weights[0].to(wide),
            key_weight=weights[1].to(wide),
        )
        outputs.append((query, cache))
    return max(_difference(actual, expected) for actual, expected in zip(*outputs, strict=True))


def _logits(device: torch.device, vocab_size: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, vocab_size, device=device) * 3


def _penalties(device: torch.device, vocab_size: int) -> float:
    logits = _logits(device, vocab_size, 3)
    state = {
        "prompt_mask": (torch.rand(5, vocab_size, device=device) < 0.1).to(torch.int8),
        "output_counts": torch.randint(0, 3, (5, vocab_size), dtype=torch.int32, device=device),
        "idx_mapping": _int32(4, 0, 2, device=device),
        "repetition": torch.tensor([1.0, 1.3, 0.8], device=device),
        "frequency": torch.tensor([0.0, 0.2, -0.1], device=device),
        "presence": torch.tensor([0.0, 0.5, 0.1], device=device),
    }
    expected = apply_penalties_ref(logits.double(), **state)
    return _difference(apply_penalties(logits, **state), expected)


def _top_k_top_p(device: torch.device, vocab_size: int) -> float:
    rows = [(1.0, 50, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (2.0, 0, 0.3, 0.0), (0.7, 40, 0.8, 0.02), (1.0, 0, 1.0, 0.1)]
    temperature, top_k, top_p, min_p = (torch.tensor(column, device=device) for column in zip(*rows, strict=True))
    parameters = {"temperature": temperature, "top_k": top_k.int(), "top_p": top_p, "min_p": min_p}
    logits = _logits(device, vocab_size, len(rows))
    expected = top_k_top_p_ref(logits.clone(), **parameters).isfinite()
    return float((top_k_top_p(logits, **parameters).isfinite() != expected).sum(1).max())


def _draw_tokens(device: torch.device, vocab_size: int) -> float:
    """How many tokens are not the reference's on the CPU, which is what the host's sampler draws."""
    logits = _logits(device, vocab_size, 8)
    last, slots = torch.full((8,), -1, dtype=torch.int32, device=device), _int32(*range(7, -1, -1), device=device)
    draw = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 2.0] * 2, device=device),
        "seeds": torch.arange(8, device=device) << 35,
        "indices": _int32(*range(8), device=device),
    }
    tokens = draw_tokens(logits, idx_mapping=slots, last_sampled_tokens=last, **draw)
    expected = draw_tokens_ref(logits.cpu(), **{name: tensor.cpu() for name, tensor in draw.items()})
    return _num_different(last.flip(0), tokens) + _num_different(tokens.cpu(), expected)


def _logprobs(device: torch.device, vocab_size: int) -> float:
    logits = _logits(device, vocab_size, 5)
    ids = torch.randint(0, vocab_size, (5, 21), device=device)
    logprobs, ranks = token_logprobs(logits, ids)
    expected, expected_ranks = token_logprobs_ref(logits.double(), ids)
    return max(_difference(logprobs, expected), _num_different(ranks, expected_ranks))


NO_LOGITS: dict[str, dict[int | None, float]] = {
    "one NaN": {17: float("nan")},
    "inf and -inf": {17: float("inf"), 18: float("-inf")},
    "NaN alone": {None: float("nan")},
}


def _beside(device: torch.device, vocab_size: int, values: dict[int | None, float]) -> float:
    """Entries of healthy rows that change when a row between them is no logits. A kernel that does not end shows here first."""
    healthy = _logits(device, vocab_size, 3)
    broken = healthy.clone()
    for token, value in values.items():
        broken[1, slice(None) if token is None else token] = value

    def run(logits: torch.Tensor) -> list[torch.Tensor]:
        ones = torch.ones(3, device=device)
        rows = {"temperature": 0.8 * ones, "top_k": _int32(20, 20, 20, device=device), "top_p": 0.9 * ones, "min_p": 0.01 * ones}
        counts = torch.ones(3, vocab_size, dtype=torch.int32, device=device)
        slots = _int32(0, 1, 2, device=device)
        ids = logits.nan_to_num(0.0).topk(5).indices
        penalized = apply_penalties(
            logits.clone(),
            prompt_mask=counts.to(torch.int8),
            output_counts=counts,
            idx_mapping=slots,
            repetition=1.3 * ones,
            frequency=0.1 * ones,
            presence=0.1 * ones,
        )
        filtered = top_k_top_p(logits.clone(), **rows)
        tokens = draw_tokens(filtered, temperature=rows["temperature"], seeds=torch.arange(3, device=device), indices=slots)
        return [penalized, filtered, tokens, *token_logprobs(logits, ids)]

    pairs = zip(run(broken), run(healthy), strict=True)
    return sum(_num_different(ours[[0, 2]], theirs[[0, 2]]) for ours, theirs in pairs)
