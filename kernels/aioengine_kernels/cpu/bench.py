"""Micro benchmarks of the native CPU kernels against torch, in the same run.

    python -m aioengine_kernels.cpu.bench                       # linear layers of SmolLM2-135M, M = 1 .. 512
    python -m aioengine_kernels.cpu.bench --what attention
    python -m aioengine_kernels.cpu.bench --rows 1 32 --threads 1 --isa avx2

Random weights in the shapes and formats of the built-in model (layers Q4_1, head Q8_0), 30 separate layers so that no cache
holds them. Every figure is the least of several rounds, the rounds of all variants taken in turn, in CPU time for one thread
and in wall time for more: on a shared machine nothing else means anything. A variant whose result is wrong prints no figure.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aioengine_kernels.cpu.kernels import CpuKernels, KvCacheFormat
from aioengine_kernels.cpu.packing import MatrixBuilder, PackedMatrix, gather_rows, pack_dense

LAYERS = 30
HIDDEN, INTERMEDIATE, VOCAB = 576, 1536, 49152
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
LAYER_SHAPES = (((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
TOLERANCE = {"float32": 1e-5, "exact": 5e-5, "fast": 1.5e-2}  # the last two: activations of 16 and of mostly 8 bits


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    run: Callable[[], object]
    error: float
    tolerance: float


def random_blocks(kind: str, rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of Q4_1 or Q8_0 blocks with random quants and sensible scales."""
    groups = columns // 32
    quants = torch.randint(0, 256, (rows, groups, 16 if kind == "Q4_1" else 32), generator=generator, dtype=torch.uint8)
    scale = (torch.rand(rows, groups, 1, generator=generator) * 0.005 + 0.002).half()
    head = [scale] if kind == "Q8_0" else [scale, -7.5 * scale]
    return torch.cat([*(part.half().view(torch.uint8) for part in head), quants], dim=-1).view(rows, -1)


def random_matrix(kind: str, rows: int, columns: int, generator: torch.Generator) -> PackedMatrix:
    builder = MatrixBuilder(kind, rows, columns)
    builder.put(0, random_blocks(kind, rows, columns, generator))
    return builder.matrix


def least_times(variants: Iterable[Variant], *, rounds: int, budget_s: float) -> dict[str, float]:
    """Seconds, the least of up to `rounds` rounds; fewer where a round takes long."""
    # One thread's own CPU time leaves out what other jobs took from it; several threads can only be timed by the wall.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best: dict[str, float] = {}
    right = [variant for variant in variants if variant.error <= variant.tolerance]
    deadline = time.perf_counter() + budget_s
    for number in range(rounds):
        for variant in right:
            start = clock()
            variant.run()
            elapsed = clock() - start
            best[variant.name] = min(elapsed, best.get(variant.name, elapsed))
        if number >= 2 and time.perf_counter() > deadline:
            break
    return best


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def print_row(label: str, variants: list[Variant], times: dict[str, float], work: float, unit: str, base: str) -> None:
    cells = []
    for variant in variants:
        seconds = times.get(variant.name)
        if seconds is None:
            cells.append(f"{variant.name}: WRONG (error {variant.error:.1e})")
            continue
        ratio = "" if variant.name == base else f" {times[base] / seconds:5.2f}x"
        cells.append(f"{variant.name} {seconds * 1e3:8.2f} ms {work / seconds * 1e-9:7.1f} {unit}{ratio}")
    print(f"{label} | " + " | ".join(cells), flush=True)


class LinearBench:
    """The matrix products of the whole model."""

    def __init__(self, generator: torch.Generator) -> None:
        self.packed = [[random_matrix("Q4_1", n, k, generator) for n, k in LAYER_SHAPES] for _ in range(LAYERS)]
        self.packed_head = random_matrix("Q8_0", VOCAB, HIDDEN, generator)
        self.dense = [[self._dense(matrix) for matrix in layer] for layer in self.packed]
        self.dense_head = self._dense(self.packed_head)
        self.panels = [[pack_dense(weight) for weight in layer] for layer in self.dense]
        self.panels_head = pack_dense(self.dense_head)

    @staticmethod
    def _dense(matrix: PackedMatrix) -> torch.Tensor:
        return gather_rows(matrix, torch.arange(matrix.rows))

    def run(self, kernels: CpuKernels, rows: list[int], generator: torch.Generator, *, rounds: int, budget_s: float) -> None:
        for m in rows:
            inputs = [torch.randn(m, k, generator=generator) for _, k in LAYER_SHAPES]
            layers = self._variants(kernels, inputs, self.packed, self.dense, self.panels)
            head = self._variants(kernels, inputs[:1], [[self.packed_head]], [[self.dense_head]], [[self.panels_head]])
            work = 2.0 * m * sum(n * k for n, k in LAYER_SHAPES) * LAYERS
            print_row(f"layers M={m:3d}", layers, least_times(layers, rounds=rounds, budget_s=budget_s), work, "GOPS", "F.linear")
            print_row(
                f"head   M={m:3d}",
                head,
                least_times(head, rounds=rounds, budget_s=budget_s / 3),
                2.0 * m * VOCAB * HIDDEN,
                "GOPS",
                "F.linear",
            )

    @staticmethod
    def _variants(
        kernels: CpuKernels,
        inputs: list[torch.Tensor],
        packed: list[list[PackedMatrix]],
        dense: list[list[torch.Tensor]],
        panels: list[list[PackedMatrix]],
    ) -> list[Variant]:
        def native(matrices: list[list[PackedMatrix]], fast: bool) -> Callable[[], object]:
            return lambda: [kernels.linear(x, w, fast=fast) for layer in matrices for x, w in zip(inputs, layer, strict=True)]

        def error(matrices: list[list[PackedMatrix]], fast: bool) -> float:
            rows = [x[:4] for x in inputs]
            return max(
                relative_error(kernels.linear(x, w, fast=fast), x.double() @ d.double().T)
                for x, w, d in zip(rows, matrices[0], dense[0], strict=True)
            )

        return [
            Variant("F.linear", lambda: [F.linear(x, w) for layer in dense for x, w in zip(inputs, layer, strict=True)], 0.0, 1.0),
            Variant("f32", native(panels, False), error(panels, False), TOLERANCE["float32"]),
            Variant("exact", native(packed, False), error(packed, False), TOLERANCE["exact"]),
            Variant("fast", native(packed, True), error(packed, True), TOLERANCE["fast"]),
        ]


def bench_attention(kernels: CpuKernels, generator: torch.Generator, *, rounds: int, budget_s: float) -> None:
    """One layer: 32 decode rows, and chunks of 64 rows, at several context lengths, against SDPA request by request."""
    for num_reqs, query_len, context in ((32, 1, 128), (32, 1, 512), (32, 1, 1024), (1, 1, 1024), (8, 64, 256), (1, 512, 512)):
        query = torch.randn(num_reqs * query_len, HEADS, HEAD_DIM, generator=generator)
        keys = torch.randn(num_reqs * context, KV_HEADS, HEAD_DIM, generator=generator)
        values = torch.randn(num_reqs * context, KV_HEADS, HEAD_DIM, generator=generator)
        table = torch.randperm(num_reqs * context // 16, generator=generator).int().view(num_reqs, -1)
        seq_lens = torch.full((num_reqs,), context, dtype=torch.int32)
        starts = torch.arange(0, num_reqs * query_len + 1, query_len, dtype=torch.int32)
        slots = (table.long()[:, :, None] * 16 + torch.arange(16)).flatten()
        shape = (num_reqs, context, KV_HEADS, HEAD_DIM)
        q4, k4, v4 = (
            query.view(num_reqs, query_len, HEADS, HEAD_DIM).transpose(1, 2),
            *(x.view(shape).transpose(1, 2) for x in (keys, values)),
        )
        mask = torch.arange(context) <= torch.arange(context - query_len, context)[:, None]

        def torch_run(q: torch.Tensor = q4, k: torch.Tensor = k4, v: torch.Tensor = v4, mask: torch.Tensor = mask) -> torch.Tensor:
            parts = [F.scaled_dot_product_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], mask, enable_gqa=True) for i in range(len(q))]
            return torch.cat(parts).transpose(1, 2).flatten(0, 1)

        want = torch_run(q4.double(), k4.double(), v4.double())
        variants = [Variant("SDPA", torch_run, 0.0, 1.0)]
        for name, dtype, tolerance in (("f32", torch.float32, 1e-5), ("f16", torch.float16, 2e-3), ("i8", torch.int8, 3e-2)):
            cache_format = KvCacheFormat(dtype, 16, KV_HEADS, HEAD_DIM)
            cache = torch.zeros(cache_format.shape(table.numel()), dtype=torch.uint8)
            kernels.rope_and_cache(
                torch.empty(len(keys), HEADS, HEAD_DIM), keys.clone(), values, kv_cache=cache, cache_format=cache_format, slots=slots
            )

            def native_run(
                cache: torch.Tensor = cache, cache_format: KvCacheFormat = cache_format, query: torch.Tensor = query
            ) -> torch.Tensor:
                return kernels.attention(
                    query,
                    kv_cache=cache,
                    cache_format=cache_format,
                    block_table=table,  # noqa: B023
                    seq_lens=seq_lens,  # noqa: B023
                    query_start_loc=starts,  # noqa: B023
                    scale=HEAD_DIM**-0.5,
                )

            variants.append(Variant(name, native_run, relative_error(native_run(), want), tolerance))
        times = least_times(variants, rounds=rounds * 4, budget_s=budget_s)
        positions = num_reqs * sum(range(context - query_len + 1, context + 1))
        print_row(
            f"attention {num_reqs:2d} x {query_len:3d} rows, context {context:4d}",
            variants,
            times,
            4.0 * positions * HEADS * HEAD_DIM,
            "GOPS",
            "SDPA",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("linear", "attention"), default="linear")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--isa", default=None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=3.0, help="seconds a line, after which no further round starts")
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    linear = LinearBench(generator) if args.what == "linear" else None
    for threads in args.threads:
        torch.set_num_threads(threads)
        kernels = CpuKernels(isa=args.isa, num_threads=threads)
        print(f"# {kernels.isa}, {threads} thread(s), torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()})", flush=True)
        with torch.inference_mode():
            if linear is not None:
                linear.run(kernels, args.rows, generator, rounds=args.rounds, budget_s=args.budget)
            else:
                bench_attention(kernels, generator, rounds=args.rounds, budget_s=args.budget)


if __name__ == "__main__":
    main()
