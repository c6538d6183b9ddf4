"""The bandwidth that the attention kernels reach, held against a copy on the same device. Run by `benchmarks/gpu_check.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from aioengine_kernels.flash_decoding import DecodeSplit
from aioengine_kernels.paged_attention import paged_attention

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """A decode step's attention in one layer of Llama-3-8B, bfloat16."""

    num_reqs: int
    context: int  # the longest
    microseconds: float
    gb_per_s: float  # of the keys and values that must be read
    share_of_copy: float


def time_gpu(run: Callable[[], object], *, device: torch.device, repeats: int = 20) -> float:
    """Seconds a call, by the device's own clock where it has one; the least of three rounds."""
    run()
    best = float("inf")
    for _ in range(3):
        if device.type != "cuda":
            begin = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - begin)
            continue
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / repeats)
    return best


def captured(run: Callable[[], object], *, device: torch.device) -> Callable[[], object]:
    """`run` as a CUDA graph, so that what is timed are the kernels and not their launches; on other devices as it is."""
    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def copy_bandwidth(device: torch.device, *, num_bytes: int = 4 << 30) -> float:
    """Bytes a second, read and written, of copying a tensor on the device: what the attention kernels are held against."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / time_gpu(lambda: target.copy_(source), device=device, repeats=5)


def attention_speed(
    device: torch.device, *, lengths: Sequence[int], copy_bytes_per_s: float, heads: tuple[int, int] = (32, 8)
) -> AttentionSpeed:
    """Several copies of the batch take turns where the keys and values of one would stay in the cache of the chip."""
    bytes_read = sum(lengths) * 2 * heads[1] * 128 * 2
    copies = max(1, -(-(256 << 20) // bytes_read)) if device.type == "cuda" else 1
    needed = [-(-length // BLOCK_SIZE) for length in lengths]
    cache = torch.randn(copies * sum(needed), 2, BLOCK_SIZE, heads[1], 128, dtype=torch.bfloat16, device=device)
    blocks = iter(torch.randperm(copies * sum(needed)).int().split(needed * copies))
    tables = torch.zeros(copies, len(lengths), max(needed), dtype=torch.int32)
    for table in tables:
        for row, count in zip(table, needed, strict=True):
            row[:count] = next(blocks)
    tables = tables.to(device)
    query = torch.randn(len(lengths), heads[0], 128, dtype=torch.bfloat16, device=device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
    split = DecodeSplit.of_lengths(lengths, num_kv_heads=heads[1], device=device)

    def run() -> None:
        for table in tables:
            paged_attention(
                query,
                key_cache=cache[:, 0],
                value_cache=cache[:, 1],
                block_table=table,
                seq_lens=seq_lens,
                query_start_loc=starts,
                max_query_len=1,
                max_seq_len=max(lengths),
                scale=128**-0.5,
                split=split,
            )

    seconds = time_gpu(captured(run, device=device), device=device, repeats=max(1, 40 // copies)) / copies
    rate = bytes_read / seconds
    return AttentionSpeed(len(lengths), max(lengths), seconds * 1e6, rate / 1e9, rate / copy_bytes_per_s)
