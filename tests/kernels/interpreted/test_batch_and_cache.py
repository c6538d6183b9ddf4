from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from aioengine_kernels.batch_inputs import BatchInputs, RequestTables, StepRows, batch_inputs, batch_inputs_ref
from aioengine_kernels.reshape_and_cache import reshape_and_cache, reshape_and_cache_ref
from aioengine_kernels.write_rows import write_rows, write_rows_ref
from aioengine_kernels.zero_blocks import zero_blocks, zero_blocks_ref

BLOCK_SIZE = 16
UNKNOWN = -1


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_tables() -> RequestTables:
    """Six slots of at most 640 tokens; every token at or past a request's known ones is -1."""
    generator = torch.Generator().manual_seed(1)
    token_table = torch.randint(5, 1000, (6, 640), generator=generator, dtype=torch.int32)
    for slot, known in ((4, 30), (0, 60), (3, 40), (5, 600)):
        token_table[slot, known:] = UNKNOWN
    block_table = torch.randperm(2 * 6 * 40, generator=generator).view(2, 6, 40).int()
    return RequestTables(token_table, block_table, last_sampled_tokens=int32(UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, 777, UNKNOWN))


def make_rows() -> StepRows:
    """A decode whose token is only on the device, the middle of a prompt, a decode the table knows, a prompt over two programs."""
    return StepRows(
        idx_mapping=int32(4, 0, 3, 5),
        query_start_loc=int32(0, 1, 18, 19, 619),
        num_computed_tokens=int32(30, 16, 12, 0),
        num_table_tokens=int32(30, 60, 40, 600),
        kv_start_loc=torch.tensor([[0, 31, 31, 44, 44], [0, 8, 8, 16, 16]], dtype=torch.int32),
        segment_len=int32(256, 32),
    )


def make_outputs(ids_dtype: torch.dtype = torch.int64, *, num_reqs: int = 6, num_tokens: int = 640) -> BatchInputs:
    return BatchInputs(
        input_ids=torch.full((num_tokens,), -9, dtype=ids_dtype),
        positions=torch.full((num_tokens,), -9),
        slot_mapping=torch.full((2, num_tokens + 3), -9)[:, :num_tokens],
        seq_lens=torch.full((num_reqs,), -9, dtype=torch.int32),
        logits_indices=torch.full((num_reqs,), -9, dtype=ids_dtype),
        block_table=torch.full((2, num_reqs, 40), -9, dtype=torch.int32),
        kv_start_loc=torch.full((2, num_reqs + 3), -9, dtype=torch.int32)[:, : num_reqs + 1],
        segment_len=torch.full((2, 4), -9, dtype=torch.int32)[:, :1],
    )


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_batch_inputs_match_the_reference(ids_dtype: torch.dtype) -> None:
    tables, expected_tables = make_tables(), make_tables()
    out, expected = make_outputs(ids_dtype), make_outputs(ids_dtype)
    batch_inputs(tables, make_rows(), out, block_size=BLOCK_SIZE, max_query_len=600)
    batch_inputs_ref(expected_tables, make_rows(), expected, block_size=BLOCK_SIZE)
    for field in fields(BatchInputs):
        assert torch.equal(getattr(out, field.name), getattr(expected, field.name)), field.name
    assert torch.equal(tables.token_table, expected_tables.token_table)


def test_the_sampled_token_is_read_on_the_device_and_kept() -> None:
    tables, out = make_tables(), make_outputs()
    batch_inputs(tables, make_rows(), out, block_size=BLOCK_SIZE, max_query_len=600)
    assert out.input_ids[0] == 777
    assert tables.token_table[4, 30] == 777
    assert tables.token_table[4, 31] == UNKNOWN
    assert (out.input_ids >= 0).all()


def test_padding_is_harmless() -> None:
    """Requests that pad a captured graph take no tokens; their slots and rows are those of nobody."""
    tables, out = make_tables(), make_outputs(num_reqs=700, num_tokens=1300)
    rows = StepRows(
        idx_mapping=int32(4, 0, 0),
        query_start_loc=int32(0, 1, 1, 1),
        num_computed_tokens=int32(30, 0, 0),
        num_table_tokens=int32(30, 60, 60),
        kv_start_loc=torch.tensor([[0, 31, 31, 31], [0, 8, 8, 8]], dtype=torch.int32),
        segment_len=int32(256, 32),
    )
    batch_inputs(tables, rows, out, block_size=BLOCK_SIZE, max_query_len=1)
    assert (out.input_ids[1:] == 0).all()
    assert (out.positions[1:] == 0).all()
    assert (out.slot_mapping[:, 1:] == -1).all()
    assert (out.seq_lens[1:] == 0).all()
    assert (out.logits_indices == 0).all()
    assert out.kv_start_loc.tolist() == [[0] + [31] * 700, [0] + [8] * 700]
    assert out.segment_len.tolist() == [[256], [32]]


def test_an_unknown_token_never_reaches_the_model() -> None:
    tables = make_tables()
    tables.last_sampled_tokens[4] = UNKNOWN
    with pytest.raises(Exception, match="not known yet"):
        batch_inputs(tables, make_rows(), make_outputs(), block_size=BLOCK_SIZE, max_query_len=600)


def test_a_slot_out_of_range_is_caught() -> None:
    rows = make_rows()
    rows.idx_mapping[1] = 6 * 40
    with pytest.raises(Exception, match="out of bounds"):
        batch_inputs(make_tables(), rows, make_outputs(), block_size=BLOCK_SIZE, max_query_len=600)


LAYOUTS = {
    "K and V apart": lambda cache: (cache[:, 0].contiguous(), cache[:, 1].contiguous()),
    "blocks of K and V": lambda cache: (cache[:, 0], cache[:, 1]),
    "heads outside": lambda cache: tuple(c.transpose(1, 2).contiguous().transpose(1, 2) for c in (cache[:, 0], cache[:, 1])),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_reshape_and_cache(layout: str, cache_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fresh = torch.zeros(7, 2, BLOCK_SIZE, 3, 40).to(cache_dtype)
    slots = torch.randperm(7 * BLOCK_SIZE)[:10]
    slots[4] = -1
    fused = torch.randn(10, 12, 40) * 100  # past fp8's range after the division by the scale
    caches = []
    for write in (reshape_and_cache, reshape_and_cache_ref):
        key_cache, value_cache = LAYOUTS[layout](fresh.clone())  # type: ignore[no-untyped-call]
        write(fused[:, 6:9], fused[:, 9:], key_cache=key_cache, value_cache=value_cache, slot_mapping=slots, k_scale=0.125, v_scale=2.0)
        caches.append((key_cache.float(), value_cache.float()))
    for written, expected in zip(*caches, strict=True):
        assert torch.equal(written, expected)
        assert written.isfinite().all()
    assert caches[0][0].abs().sum() > 0


def test_a_slot_past_the_cache_is_caught() -> None:
    cache = torch.zeros(2, BLOCK_SIZE, 3, 64)
    key = torch.ones(1, 3, 64)
    with pytest.raises(Exception, match="out of bounds"):
        reshape_and_cache(key, key, key_cache=cache, value_cache=cache.clone(), slot_mapping=torch.tensor([2 * BLOCK_SIZE]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_zero_blocks(dtype: torch.dtype) -> None:
    cache = torch.randn(8, 2, BLOCK_SIZE, 3, 40).to(dtype)
    expected = cache.clone()
    keys, expected_keys = cache[:, 0], expected[:, 0]
    zero_blocks(keys, int32(2, -1, 5))
    zero_blocks_ref(expected_keys, int32(2, -1, 5))
    assert torch.equal(cache.float(), expected.float())
    assert (keys[[2, 5]] == 0).all() if dtype != torch.float8_e4m3fn else (keys.float()[[2, 5]] == 0).all()
    assert cache[:, 1].float().ne(0).any(dim=(1, 2, 3)).all()


def test_write_rows_write_the_pieces_and_nothing_else() -> None:
    table, expected = torch.full((4, 3000), -9, dtype=torch.int32), torch.full((4, 3000), -9, dtype=torch.int32)
    values = torch.arange(2600, dtype=torch.int32)
    pieces = torch.tensor([[2, 0, 2500, 0], [0, 2999, 1, 2500], [2, 2500, 0, 0], [3, 1000, 99, 2501]], dtype=torch.int32)
    write_rows(table, pieces, values, max_length=2500)
    write_rows_ref(expected, pieces, values)
    assert torch.equal(table, expected)
    assert (table != -9).sum() == 2600
