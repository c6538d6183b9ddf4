"""The torch references and what surrounds the kernels, on CPU tensors in an ordinary process, as the CPU path uses them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aioengine_kernels.activation import gelu_mul, silu_mul
from aioengine_kernels.batch_inputs import BatchInputs, RequestTables, StepRows, batch_inputs
from aioengine_kernels.draw_tokens import draw_tokens
from aioengine_kernels.flash_decoding import (
    MAX_SEGMENTS,
    MIN_SEGMENT_TOKENS,
    TARGET_PROGRAMS,
    DecodeSplit,
    choose_num_segments,
    choose_segment_len,
    max_num_segments,
)
from aioengine_kernels.logprobs import token_logprobs
from aioengine_kernels.paged_attention import paged_attention, plan_attention
from aioengine_kernels.penalties import apply_penalties
from aioengine_kernels.reshape_and_cache import reshape_and_cache
from aioengine_kernels.rms_norm import rms_norm
from aioengine_kernels.rope import apply_rope, build_cos_sin_cache, inverse_frequencies
from aioengine_kernels.top_k_top_p import top_k_top_p
from aioengine_kernels.zero_blocks import zero_blocks

KERNELS = Path(__file__).parents[2] / "kernels"


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_modules_import_and_run_where_triton_is_missing() -> None:
    """As on macOS: dispatchers take the reference, and a kernel launched all the same says what is missing."""
    program = """
import sys
sys.modules["triton"] = None
import importlib, pkgutil
import aioengine_kernels
for module in pkgutil.iter_modules(aioengine_kernels.__path__):
    importlib.import_module(f"aioengine_kernels.{module.name}")
import torch
from aioengine_kernels.rms_norm import rms_norm, rms_norm_triton
x = torch.ones(2, 8)
print(rms_norm(x, torch.ones(8), eps=0.0).sum().item())
try:
    rms_norm_triton(x, torch.ones(8), eps=0.0)
except RuntimeError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(KERNELS)}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "16.0"
    assert "_rms_norm_kernel needs Triton" in lines[1]


def test_the_package_imports_neither_torch_nor_triton() -> None:
    program = "import sys, aioengine_kernels; print([name for name in ('torch', 'triton') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(KERNELS)}, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


LENGTHS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 200_000)), min_size=1, max_size=300)


@given(lengths=LENGTHS, num_kv_heads=st.integers(1, 32))
def test_decodes_are_cut_evenly_and_every_segment_has_a_number_of_its_own(lengths: list[int], num_kv_heads: int) -> None:
    split = DecodeSplit.of_lengths(lengths, num_kv_heads=num_kv_heads, device=torch.device("cpu"))
    segment_len, starts = int(split.segment_len), split.kv_start_loc.tolist()
    counts = [max(-(-length // segment_len), 1) for length in lengths]
    firsts = [start // segment_len + i for i, start in enumerate(starts)]
    for count, first, following in zip(counts, firsts, firsts[1:], strict=False):
        assert first + count <= following
    assert firsts[-1] == split.num_segments <= max_num_segments(num_reqs=len(lengths), num_kv_heads=num_kv_heads)
    assert max(counts) <= MAX_SEGMENTS
    assert split.is_split == (max(counts) > 1)
    # No program walks further than an even share of all positions, or the least, or the longest in the most segments.
    share = max(-(-sum(lengths) * num_kv_heads // TARGET_PROGRAMS), MIN_SEGMENT_TOKENS, -(-max(lengths) // MAX_SEGMENTS))
    assert share <= segment_len < share + 32 + num_kv_heads


def longest_walk(lengths: list[int], num_kv_heads: int) -> tuple[int, int]:
    """The positions of the longest segment, and how many segments the longest sequence has."""
    split = DecodeSplit.of_lengths(lengths, num_kv_heads=num_kv_heads, device=torch.device("cpu"))
    count = -(-max(lengths) // int(split.segment_len))
    return -(-max(lengths) // count), count


def test_one_long_request_among_many_does_not_walk_alone() -> None:
    """From 34 requests x 8 KV heads on there are programs enough without a split: it was the longest that waited."""
    assert longest_walk([131072] + [1024] * 33, 8) == (4855, 27)
    assert longest_walk([131072] + [1024] * 255, 8)[1] >= 10
    assert longest_walk([131072], 8) == (4096, 32)
    assert longest_walk([8192], 8) == (256, 32)
    assert longest_walk([1024] * 256, 8)[1] == 1, "equal ones fill the device as they are"
    assert longest_walk([256], 1)[1] == 1


@given(num_reqs=st.integers(1, 512), num_kv_heads=st.integers(1, 32), max_seq_len=st.integers(1, 200_000))
def test_a_split_by_bounds_holds_for_any_lengths(num_reqs: int, num_kv_heads: int, max_seq_len: int) -> None:
    """A captured graph has the grid of the bounds, whatever the lengths are when it runs."""
    lengths = torch.randint(0, max_seq_len + 1, (num_reqs,), dtype=torch.int32)
    split = DecodeSplit.of_bounds(lengths, max_seq_len=max_seq_len, num_kv_heads=num_kv_heads)
    segment_len = int(split.segment_len)
    assert int(split.kv_start_loc[-1]) // segment_len + num_reqs <= split.num_segments
    assert split.is_split or int(lengths.max()) <= segment_len


@given(num_blocks=st.integers(1, 1024), num_kv_heads=st.integers(1, 32), max_seq_len=st.integers(1, 200_000))
def test_chunks_are_cut_until_the_device_is_full(num_blocks: int, num_kv_heads: int, max_seq_len: int) -> None:
    segments = choose_num_segments(num_query_blocks=num_blocks, num_kv_heads=num_kv_heads, max_seq_len=max_seq_len)
    assert 1 <= segments <= MAX_SEGMENTS
    if segments > 1:
        assert num_blocks * num_kv_heads * segments <= TARGET_PROGRAMS
        assert max_seq_len // segments >= MIN_SEGMENT_TOKENS


@given(
    group=st.integers(1, 64),
    num_kv_heads=st.integers(1, 8),
    head_dim=st.integers(8, 128).map(lambda half: 2 * half),
    num_reqs=st.integers(1, 64),
    query_len=st.integers(1, 600),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_a_plan_covers_every_query_row(
    group: int, num_kv_heads: int, head_dim: int, num_reqs: int, query_len: int, dtype: torch.dtype
) -> None:
    shape = {"num_heads": group * num_kv_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype}
    for plan in (plan_attention(decode=True, **shape), plan_attention(decode=False, **shape)):
        assert plan.block_q >= 1
        assert plan.block_q * group <= plan.block_m
        assert plan.precision == ("tf32x3" if dtype == torch.float32 else "ieee"), "float32 takes tensor cores, too"
    # The launch of chunks has as many query blocks as all requests need, wherever their rows begin.
    starts = range(0, num_reqs * query_len, query_len)
    first_blocks = [start // plan.block_q + i for i, start in enumerate(starts)]
    needed = -(-query_len // plan.block_q)
    for first, following in zip(first_blocks, [*first_blocks[1:], num_reqs * query_len // plan.block_q + num_reqs], strict=True):
        assert first + needed <= following


def test_the_launch_numbers_in_the_docstrings() -> None:
    assert choose_segment_len(num_positions=8192, longest=8192, num_kv_heads=8) == 256
    assert choose_segment_len(num_positions=131072 + 33 * 1024, longest=131072, num_kv_heads=8) == 5024
    assert choose_segment_len(num_positions=256 * 1024, longest=1024, num_kv_heads=8) == 7968
    assert choose_num_segments(num_query_blocks=65, num_kv_heads=8, max_seq_len=8192) == 1
    assert choose_num_segments(num_query_blocks=2, num_kv_heads=8, max_seq_len=32768) == 16


def _kernel_loops() -> list[tuple[str, ast.While | ast.For]]:
    loops: list[tuple[str, ast.While | ast.For]] = []
    for path in sorted((KERNELS / "aioengine_kernels").glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and any(isinstance(d, ast.Name) and d.id == "jit" for d in function.decorator_list):
                loops += [(f"{path.name}: {function.name}", node) for node in ast.walk(function) if isinstance(node, ast.While | ast.For)]
    return loops


def test_every_loop_in_a_kernel_is_bounded_whatever_the_data() -> None:
    """A loop that ends when a value says so does not end where that value is NaN: a GPU then hangs for all. So passes are counted."""
    loops = _kernel_loops()
    assert len(loops) > 5
    for name, loop in loops:
        if isinstance(loop, ast.For):
            assert isinstance(loop.iter, ast.Call), name
            assert ast.unparse(loop.iter.func) in ("tl.range", "range", "tl.static_range"), name
        else:
            bounds = [node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name) and node.id.startswith("_MAX_")]
            assert bounds, f"{name}: `while {ast.unparse(loop.test)}` has no bound of its own"


def test_attention_through_the_cache_is_attention() -> None:
    """KV write, then paged attention of a prompt in two chunks: equal to torch's attention over the dense tensors."""
    torch.manual_seed(0)
    length, cut, block_size = 37, 20, 16
    query, key, value = (torch.randn(length, heads, 32) for heads in (4, 2, 2))
    cache = torch.full((8, 2, block_size, 2, 32), float("nan"))
    blocks = torch.tensor([5, 2, 7])
    positions = torch.arange(length)
    slots = blocks[positions // block_size] * block_size + positions % block_size
    outputs = []
    for rows in (slice(0, cut), slice(cut, length)):
        reshape_and_cache(key[rows], value[rows], key_cache=cache[:, 0], value_cache=cache[:, 1], slot_mapping=slots[rows])
        outputs.append(
            paged_attention(
                query[rows],
                key_cache=cache[:, 0],
                value_cache=cache[:, 1],
                block_table=blocks.int().unsqueeze(0),
                seq_lens=int32(rows.stop),
                query_start_loc=int32(0, rows.stop - rows.start),
                max_query_len=rows.stop - rows.start,
                max_seq_len=rows.stop,
                scale=32**-0.5,
            )
        )
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-5, rtol=1e-5)


TABLE = [[9, 8, 7, 6, 5], [4, 3, 2, 1, 0], [19, 18, 17, 16, 15]]


def test_batch_inputs_of_the_seed_example() -> None:
    """[2, 5, 3] scheduled tokens: positions, ids and slots by hand. The second group's tables have other first blocks."""
    tables = RequestTables(
        token_table=torch.arange(60, dtype=torch.int32).view(3, 20).clone(),
        block_table=torch.tensor([TABLE, [[row[0] + 20, *row[1:]] for row in TABLE]], dtype=torch.int32),
        last_sampled_tokens=int32(-1, 500, -1),
    )
    rows = StepRows(
        idx_mapping=int32(2, 0, 1),
        query_start_loc=int32(0, 2, 7, 10),
        num_computed_tokens=int32(3, 0, 6),
        num_table_tokens=int32(20, 20, 8),
        kv_start_loc=torch.tensor([[0, 0, 0, 9], [0, 0, 0, 4]], dtype=torch.int32),
        segment_len=int32(256, 32),
    )
    out = BatchInputs(
        input_ids=torch.empty(12, dtype=torch.int64),
        positions=torch.empty(12, dtype=torch.int64),
        slot_mapping=torch.empty(2, 12, dtype=torch.int64),
        seq_lens=torch.empty(4, dtype=torch.int32),
        logits_indices=torch.empty(4, dtype=torch.int64),
        block_table=torch.full((2, 4, 5), -1, dtype=torch.int32),
        kv_start_loc=torch.empty(2, 5, dtype=torch.int32),
        segment_len=torch.empty(2, 1, dtype=torch.int32),
    )
    batch_inputs(tables, rows, out, block_size=4, max_query_len=5)
    assert out.input_ids.tolist() == [43, 44, 0, 1, 2, 3, 4, 26, 27, 500, 0, 0]
    assert out.positions.tolist() == [3, 4, 0, 1, 2, 3, 4, 6, 7, 8, 0, 0]
    slots = [79, 72, 36, 37, 38, 39, 32, 14, 15, 8, -1, -1]
    assert out.slot_mapping.tolist() == [slots, [159, 72, 116, 117, 118, 119, *slots[6:]]]
    assert out.seq_lens.tolist() == [5, 5, 9, 0]
    assert out.logits_indices.tolist() == [1, 6, 9, 0]
    assert out.kv_start_loc.tolist() == [[0, 0, 0, 9, 9], [0, 0, 0, 4, 4]]
    assert out.segment_len.tolist() == [[256], [32]]
    assert out.block_table[0].tolist() == [[19, 18, -1, -1, -1], [9, 8, -1, -1, -1], [4, 3, 2, -1, -1], [-1] * 5]
    assert out.block_table[1].tolist() == [[39, 18, -1, -1, -1], [29, 8, -1, -1, -1], [24, 3, 2, -1, -1], [-1] * 5]
    assert tables.token_table[1, 8] == 500


def test_fp8_cache_clamps() -> None:
    cache = torch.zeros(1, 2, 4, 1, 2).to(torch.float8_e4m3fn)
    key = torch.tensor([[[1e6, -3.0]]])
    reshape_and_cache(key, key, key_cache=cache[:, 0], value_cache=cache[:, 1], slot_mapping=torch.tensor([2]), k_scale=0.5, v_scale=1.0)
    assert cache.float()[0, 0, 2].tolist() == [[448.0, -6.0]]
    assert cache.float()[0, 1, 2].tolist() == [[448.0, -3.0]]


def test_zero_blocks_refuses_blocks_that_are_not_dense() -> None:
    with pytest.raises(ValueError, match="dense"):
        zero_blocks(torch.ones(4, 6)[:, ::2], int32(0))


@settings(max_examples=50, deadline=None)
@example(seed=0, temperature=0.5, top_k=0, top_p=1.0, min_p=0.0)
@given(
    seed=st.integers(0, 2**16),
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(-1, 40),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
)
def test_filters_keep_the_smallest_sufficient_set(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)).double() * 3
    filtered = top_k_top_p(
        logits.clone(),
        temperature=torch.tensor([temperature]).double(),
        top_k=int32(top_k),
        top_p=torch.tensor([top_p]).double(),
        min_p=torch.tensor([min_p]).double(),
    )
    kept = filtered.isfinite()[0]
    order = logits[0].argsort(descending=True)
    assert kept[order].int().diff().le(0).all()  # the likeliest tokens, without a gap
    probabilities = (logits[0] / temperature).softmax(0)
    allowed = probabilities >= min_p * probabilities.max() * (1 - 1e-9)
    count = min(top_k, int(allowed.sum())) if top_k > 0 else int(allowed.sum())
    candidates = probabilities[order][:count] / probabilities[order][:count].sum()
    # A top_p of 1 keeps all of them, also those that the tolerance below would lose.
    enough = count if top_p == 1.0 else int((candidates.cumsum(0) < top_p * (1 - 1e-9)).sum()) + 1
    assert int(kept.sum()) == min(enough, count)


def test_draws_follow_the_softmax() -> None:
    """2000 successive tokens of one seed; 4 standard deviations of the widest bin."""
    draws, temperature = 2000, 0.8
    row = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, float("-inf"), -2.0, 1.5])
    tokens = draw_tokens(
        row.repeat(draws, 1),
        temperature=torch.full((draws,), temperature),
        seeds=torch.full((draws,), 42),
        indices=torch.arange(draws),
    )
    frequency = torch.bincount(tokens.long(), minlength=8) / draws
    assert (frequency - (row / temperature).softmax(0)).abs().max() < 4 * 0.5 / draws**0.5
    assert frequency[5] == 0


def test_logprobs_and_ranks_by_hand() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 2.0]])
    logprobs, ranks = token_logprobs(logits, torch.tensor([[1, 2]]))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[:, 1:3])
    assert ranks.tolist() == [3]


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 1.0]])
    apply_penalties(
        logits,
        prompt_mask=torch.tensor([[0, 1, 0, 0]], dtype=torch.int8),
        output_counts=torch.tensor([[0, 0, 3, 0]], dtype=torch.int32),
        idx_mapping=int32(0),
        repetition=torch.tensor([2.0]),
        frequency=torch.tensor([0.1]),
        presence=torch.tensor([0.25]),
    )
    torch.testing.assert_close(logits, torch.tensor([[2.0, -4.0, 0.5 - 0.3 - 0.25, 1.0]]))


def test_layer_ops_equal_torch() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 64), torch.randn(64)
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-5), torch.nn.functional.rms_norm(x, (64,), weight, eps=1e-5))
    gate, up = x.chunk(2, dim=1)
    torch.testing.assert_close(silu_mul(x), torch.nn.functional.silu(gate) * up)
    torch.testing.assert_close(gelu_mul(x), torch.nn.functional.gelu(gate, approximate="tanh") * up)


def test_rope_keeps_the_angle_between_positions() -> None:
    """The rotation's purpose: q at position i and k at position j meet in a product that depends on i - j only."""
    cache = build_cos_sin_cache(inverse_frequencies(32, theta=1e4), max_position=64)
    base_query, base_key = torch.randn(1, 1, 32), torch.randn(1, 1, 32)
    products = []
    for i, j in ((10, 4), (50, 44)):
        query, key = base_query.clone(), base_key.clone()
        apply_rope(query, torch.zeros(1, 1, 32), positions=torch.tensor([i]), cos_sin_cache=cache)
        apply_rope(torch.zeros(1, 1, 32), key, positions=torch.tensor([j]), cos_sin_cache=cache)
        products.append((query * key).sum())
    torch.testing.assert_close(products[0], products[1], atol=1e-4, rtol=1e-4)


def test_rope_scaling_matches_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, max_position_embeddings=131072, rope_parameters=scaling)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(128, theta=5e5, scaling=scaling).float(), expected)
    linear = inverse_frequencies(128, theta=1e4, scaling={"type": "linear", "factor": 4.0})
    torch.testing.assert_close(linear, inverse_frequencies(128, theta=1e4) / 4)


def test_an_unknown_rope_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="'yarn'"):
        inverse_frequencies(64, theta=1e4, scaling={"rope_type": "yarn"})
