"""What this machine can do at most: multiplications and reads a second, measured."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from aioengine_kernels.cpu.abi import PeakArgs
from aioengine_kernels.cpu.library import ISAS, choose_isa, open_library

KINDS = ("float32", "int8", "bf16", "read")  # the index is the number in the C ABI
MEMORY_BYTES = 256 << 20  # beyond every cache, in the hope that no L3 holds a tenth of it
_ROUND_S = 0.02


@dataclass(frozen=True, slots=True)
class Peak:
    """Of one instruction set and number of threads. Operations a second count a multiply-add as two."""

    isa: str
    num_threads: int
    float32_ops_s: float  # fused multiply-adds
    int8_ops_s: float | None  # vpdpbusd, or vpmaddubsw with an addition; None: the instruction set multiplies no bytes
    bf16_ops_s: float | None  # vdpbf16ps; None: the CPU has none
    read_bytes_s: float  # of memory beyond the caches


def measure_peak(*, isa: str | None = None, num_threads: int = 1, budget_s: float = 0.3, memory_bytes: int = MEMORY_BYTES) -> Peak:
    """Each figure is the best of as many rounds of at most 20 ms as fit into `budget_s` seconds, at least three.

    One thread is timed by its own CPU time, which leaves out what other jobs took from it; several by the wall.

    isa: see `choose_isa`. memory_bytes: what is read.
    """
    library, chosen = open_library(), choose_isa(isa)
    memory = torch.ones(memory_bytes // 4)
    clock = time.thread_time if num_threads == 1 else time.perf_counter

    def run(kind: str, repeats: int) -> tuple[float, float]:
        args = PeakArgs(
            isa=ISAS.index(chosen),
            kind=KINDS.index(kind),
            num_threads=num_threads,
            repeats=repeats,
            data=memory.data_ptr(),
            bytes=memory_bytes,
        )
        start = clock()
        work = library.aio_peak(args)
        return work, clock() - start

    def best(kind: str) -> float | None:
        repeats = 1 if kind == "read" else 1000
        work, seconds = run(kind, repeats)
        if not work:
            return None
        if kind != "read":
            while (seconds := run(kind, repeats)[1]) < min(_ROUND_S, max(budget_s / 10, 1e-3)):
                repeats *= 2
        rates: list[float] = []
        end = time.perf_counter() + budget_s
        while len(rates) < 3 or time.perf_counter() < end:
            work, seconds = run(kind, repeats)
            rates.append(work / seconds)
        return max(rates)

    float32, read = best("float32"), best("read")
    assert float32 is not None
    assert read is not None
    return Peak(chosen, num_threads, float32, best("int8"), best("bf16"), read)
