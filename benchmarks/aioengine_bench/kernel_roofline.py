"""`aioengine bench kernels --roofline`: the native matrix products as shares of what this machine does at most.

For each instruction set and number of threads the peaks are measured first: multiply-adds in float32, integer dot products, bfloat16
dot products, and reads of memory. Then the products of a layer of the built-in model's shapes and of its head, with so many copies of
each matrix that they come from memory, as in a step. Everything is CPU time for one thread and wall time for more: on a machine that
does other work, measure one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aioengine.errors import ConfigError
from aioengine_bench import console

if TYPE_CHECKING:
    import torch

    from aioengine_kernels.cpu.packing import PackedMatrix
    from aioengine_kernels.cpu.peak import Peak

_NAMES = ("qkv", "output", "gate_up", "down")
_DIGITS = {"fast": 1, "exact": 2}  # products with an activation's digit, at least
COPIES_BYTES = 64 << 20  # more than an L3 that two cores get


def roofline_rows(*, num_tokens: Sequence[int], threads: Sequence[int], min_time: float) -> Iterator[dict[str, Any]]:
    """One row a matrix, mode, number of rows, number of threads and instruction set; before them the peaks. Raises ConfigError."""
    from aioengine_kernels.cpu import status, supported_isas
    from aioengine_kernels.cpu.peak import measure_peak

    if (reason := status()) is not None:
        raise ConfigError(f"--roofline measures the native CPU kernels: {reason}")
    matrices = _matrices(COPIES_BYTES)
    isas = supported_isas()
    for isa in isas[1:] or isas:  # plain C++ is for processors that have nothing else
        for num_threads in threads:
            peak = measure_peak(isa=isa, num_threads=num_threads)
            yield _peak_row(peak)
            if peak.int8_ops_s is None:
                continue  # there is no product of bytes to hold these to
            for name, copies in matrices.items():
                for m in num_tokens:
                    for mode in _DIGITS:
                        yield _measure(name, copies, peak, mode=mode, m=m, min_time=min_time)


def _matrices(copies_bytes: int) -> dict[str, list[PackedMatrix]]:
    import torch

    from aioengine_kernels.cpu.bench import HIDDEN, LAYER_SHAPES, VOCAB, random_matrix

    generator = torch.Generator().manual_seed(0)
    shapes = [(name, "Q4_1", *shape) for name, shape in zip(_NAMES, LAYER_SHAPES, strict=True)] + [("head", "Q8_0", VOCAB, HIDDEN)]
    matrices: dict[str, list[PackedMatrix]] = {}
    for name, kind, rows, columns in shapes:
        first = random_matrix(kind, rows, columns, generator)
        more = -(-copies_bytes // first.nbytes) - 1
        matrices[name] = [first, *(replace(first, data=_aligned_copy(first.data)) for _ in range(more))]
    return matrices


def _aligned_copy(data: torch.Tensor) -> torch.Tensor:
    from aioengine_kernels.cpu.packing import aligned_zeros

    return aligned_zeros(data.numel()).copy_(data)


def _peak_row(peak: Peak) -> dict[str, Any]:
    def giga(value: float | None) -> float | None:
        return None if value is None else value / 1e9

    return {
        "isa": peak.isa,
        "threads": peak.num_threads,
        "op": "peak",
        "float32_gflops": giga(peak.float32_ops_s),
        "int8_gops": giga(peak.int8_ops_s),
        "bf16_gflops": giga(peak.bf16_ops_s),
        "read_gb_per_s": giga(peak.read_bytes_s),
    }


def _measure(name: str, copies: Sequence[PackedMatrix], peak: Peak, *, mode: str, m: int, min_time: float) -> dict[str, Any]:
    import torch

    from aioengine_kernels.cpu import CpuKernels

    kernels = CpuKernels(isa=peak.isa, num_threads=peak.num_threads)
    rows, columns = copies[0].rows, copies[0].columns
    x = torch.randn(m, columns, generator=torch.Generator().manual_seed(1))
    out = torch.empty(m, rows)  # not a new one a call, whose pages would be cleared first
    clock = time.thread_time if peak.num_threads == 1 else time.perf_counter
    best, end = float("inf"), 0.0
    while not end or time.perf_counter() < end:
        start = clock()
        for matrix in copies:
            kernels.linear(x, matrix, fast=mode == "fast", out=out)
        seconds = clock() - start
        if end:  # the first round fetches code and scratch memory
            best = min(best, seconds)
        else:
            end = time.perf_counter() + max(min_time, 2 * seconds)
    operations, num_bytes = 2.0 * m * rows * columns * len(copies), float(copies[0].nbytes * len(copies))
    assert peak.int8_ops_s is not None
    by_arithmetic, by_memory = _DIGITS[mode] * operations / peak.int8_ops_s, num_bytes / peak.read_bytes_s
    return {
        "isa": peak.isa,
        "threads": peak.num_threads,
        "op": name,
        "kind": copies[0].kind,
        "rows": rows,
        "columns": columns,
        "num_tokens": m,
        "mode": mode,
        "time_us": best * 1e6 / len(copies),
        "gops": operations / best / 1e9,
        "of_int8_peak": operations / best / peak.int8_ops_s,
        "gb_per_s": num_bytes / best / 1e9,
        "of_read_peak": num_bytes / best / peak.read_bytes_s,
        "bound": "memory" if by_memory > by_arithmetic else "arithmetic",
        "of_roofline": max(by_arithmetic, by_memory) / best,
    }


def format_roofline(rows: Sequence[dict[str, Any]]) -> str:
    """A line of peaks and a table of products for each instruction set and number of threads."""
    parts: list[str] = []
    table: list[list[str]] = []
    head = ["op", "kind", "shape", "tokens", "mode", "us", "GOPS", "of peak", "GB/s", "of peak", "bound by", "of roofline"]

    def end_table() -> None:
        if table:
            parts.append(console.table(head, table))
            table.clear()

    for row in rows:
        if row["op"] == "peak":
            end_table()
            speeds = [
                ("float32_gflops", "float32 {:.0f} GFLOP/s"),
                ("int8_gops", "int8 {:.0f} GOP/s"),
                ("bf16_gflops", "bf16 {:.0f} GFLOP/s"),
            ]
            known = [text.format(row[key]) for key, text in speeds if row[key] is not None]
            known.append(f"reads {row['read_gb_per_s']:.1f} GB/s")
            parts.append(f"{row['isa']}, {row['threads']} thread{'s' if row['threads'] > 1 else ''}, at most: {', '.join(known)}")
            continue
        shape = f"{row['rows']} x {row['columns']}"
        speed = [f"{row['gops']:.0f}", f"{row['of_int8_peak']:.0%}", f"{row['gb_per_s']:.1f}", f"{row['of_read_peak']:.0%}"]
        what = [row["op"], row["kind"], shape, str(row["num_tokens"]), row["mode"], f"{row['time_us']:.1f}"]
        table.append([*what, *speed, row["bound"], f"{row['of_roofline']:.0%}"])
    end_table()
    return "\n".join(parts)
