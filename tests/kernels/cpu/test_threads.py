"""More threads than cores: the same bits, every item once, no step that hangs; and those who share a machine or a process get on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aioengine_kernels.cpu import CpuKernels, DecoderShape, GroupInputs, KvCacheFormat, LayerWeights, NativeDecoder, status
from aioengine_kernels.cpu.packing import pack_dense

Randn = Callable[..., torch.Tensor]
NUM_THREADS = (1, 2, 3, 4, 8, 16)
HIDDEN, HEADS, KV_HEADS, DIM = 64, 4, 2, 16

pytestmark = pytest.mark.skipif(status() is not None, reason=str(status()))
linux = pytest.mark.skipif("sys.platform != 'linux'")


def run_program(code: str) -> subprocess.Popen[str]:
    """A process of its own: its threads are not there for other tests."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


def output_of(process: subprocess.Popen[str]) -> list[str]:
    """Raises TimeoutExpired for one that hangs."""
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    return output.split()


@pytest.mark.parametrize("num_threads", NUM_THREADS)
def test_every_item_is_computed_once(num_threads: int, randn: Randn) -> None:
    """A row that were added twice, or not at all, would show: the sum is made in place, and what is not written is NaN."""
    kernels = CpuKernels(num_threads=num_threads)
    for m in (1, 2, 15, 16, 17, 63, 257):
        x, residual = torch.ones(m, 48), torch.arange(m * 48, dtype=torch.float32).view(m, 48)
        want = residual + 1
        for _ in range(100):
            kernels.rms_norm(x, torch.ones(48), eps=1e-6, residual=residual)
        assert torch.equal(residual, want + 99)
    for n in (1, 16, 17, 160, 161, 1000):
        weight, x = torch.eye(n, 32), randn(3, 32)
        out = torch.full((3, n), float("nan"))
        kernels.linear(x, pack_dense(weight), out=out)
        assert torch.equal(out, x @ weight.T)


def make_decoder(kernels: CpuKernels, randn: Randn, cache_rows: int) -> NativeDecoder:
    shapes = {
        "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
        "output": (HIDDEN, HEADS * DIM),
        "gate_up": (160, HIDDEN),
        "down": (HIDDEN, 80),
    }
    layers = []
    for _ in range(2):
        packed: dict[str, Any] = {name: pack_dense(randn(*shape) * 0.1) for name, shape in shapes.items()}
        layers.append(LayerWeights(**packed, input_norm=randn(HIDDEN), post_norm=randn(HIDDEN)))
    shape = DecoderShape(HEADS, KvCacheFormat(torch.float32, 16, KV_HEADS, DIM), HIDDEN, 1e-5, DIM**-0.5)
    caches = [torch.zeros(shape.cache_format.shape(cache_rows // 16), dtype=torch.uint8) for _ in layers]
    return NativeDecoder(
        kernels, shape, layers, final_norm=randn(HIDDEN), cos_sin=randn(cache_rows, DIM), kv_caches=caches, fast=False
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [[600], [1] * 70, [1, 530, 2, 7], [9] * 4, [1, 1, 1]])
def test_a_step_has_the_same_bits_however_many_threads_share_it(lengths: list[int]) -> None:
    """From 4 rows a thread (from 3 threads on: 2 a thread and thread) they share rows, below that columns; 600 rows are enough for 16."""
    rows, blocks = sum(lengths), [-(-length // 16) for length in lengths]
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for i, count in enumerate(blocks):
        table[i, :count] = torch.arange(sum(blocks[:i]), sum(blocks[: i + 1]))
    positions = torch.cat([torch.arange(length) for length in lengths])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    step: dict[str, Any] = {
        "groups": [GroupInputs(table[owner, positions // 16].long() * 16 + positions % 16, table)],
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
    }
    results = []
    for num_threads in NUM_THREADS:
        generator = torch.Generator().manual_seed(3)

        def randn(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        decoder = make_decoder(CpuKernels(num_threads=num_threads), randn, 16 * sum(blocks))
        x = randn(rows, HIDDEN)
        results.append((decoder.forward(x, positions, **step), x))  # x: the last layer's output now
    assert results[0][0].isfinite().all()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


STEPS = """
import os, sys, time, torch
torch.set_num_threads(1)
from aioengine_kernels.cpu import CpuKernels
from aioengine_kernels.cpu.packing import pack_dense
packed, x = pack_dense(torch.ones(640, 256)), torch.ones(12, 256)
def count(num_threads, seconds):
    kernels, num_steps, end = CpuKernels(num_threads=num_threads), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        assert bool((kernels.linear(x, packed) == 256).all())
        num_steps += 1
    return num_steps
"""


def count_steps(num_threads: int, seconds: float) -> int:
    """How many products get done in that time, all of them right."""
    kernels, generator = CpuKernels(num_threads=num_threads), torch.Generator().manual_seed(5)
    packed, x = pack_dense(torch.randn(640, 256, generator=generator)), torch.randn(12, 256, generator=generator)
    want, num_steps, end = CpuKernels(num_threads=1).linear(x, packed), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        assert torch.equal(kernels.linear(x, packed), want)
        num_steps += 1
    return num_steps


@pytest.mark.alone
def test_many_more_threads_than_cores_finish_in_bounded_time() -> None:
    """Who waits yields: 16 threads lose to 2 a small factor, not a time slice for each thread and product."""
    few, many = (max(count_steps(num_threads, 0.15) for _ in range(3)) for num_threads in (2, 16))
    assert many > few / 20, (few, many)


@pytest.mark.alone
def test_two_processes_on_the_same_cores_both_go_on() -> None:
    process = run_program(STEPS + "count(4, 0.01)\nprint('ready', flush=True)\nprint(count(4, 0.6))")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    ours = count_steps(4, 0.6)
    theirs = int(output_of(process)[0])
    assert min(ours, theirs) > max(ours, theirs) / 10, (ours, theirs)


@pytest.mark.alone
def test_two_engines_in_one_process_both_go_on() -> None:
    """One has the helpers at a time, the other works alone meanwhile: neither waits for the other."""
    counts, start = [0, 0], threading.Barrier(2)

    def work(which: int) -> None:
        start.wait()
        counts[which] = count_steps(3, 0.5)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert min(counts) > max(counts) / 10, counts


@linux
def test_helpers_run_where_the_thread_that_they_help_is_pinned() -> None:
    """Of two callers each has its own cores, and one of whom nobody said anything keeps all. Helpers follow who they work for."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core is all there is")
    code = (
        STEPS + "import threading\nfrom aioengine_kernels.cpu import pin_thread\neverything = sorted(os.sched_getaffinity(0))\n"
        "first, last = everything[:1], everything[-1:]\n"
        "threads = lambda: {int(tid) for tid in os.listdir('/proc/self/task')}\n"
        "before = threads()\n"
        "count(3, 0.05)\n"
        "helpers = sorted(threads() - before)\n"
        "assert len(helpers) == 2\n"
        "def caller(cores):\n"
        "    if cores: pin_thread(cores)\n"
        "    wanted, end = cores or everything, time.monotonic() + 20\n"
        "    while time.monotonic() < end:\n"  # a helper that did not get its turn in time has not moved: let it try again
        "        count(3, 0.02)\n"
        "        if all(sorted(os.sched_getaffinity(tid)) == wanted for tid in helpers): break\n"
        "    print(sorted(os.sched_getaffinity(0)) == wanted, all(sorted(os.sched_getaffinity(tid)) == wanted for tid in helpers))\n"
        "for cores in (first, last, None, first, everything):\n"
        "    thread = threading.Thread(target=caller, args=(cores,)); thread.start(); thread.join()\n"
        "print(sorted(os.sched_getaffinity(0)) == everything)\n"
    )
    assert output_of(run_program(code)) == ["True"] * 11


@linux
def test_cores_that_are_not_there_cannot_be_taken() -> None:
    code = "from aioengine_kernels.cpu import pin_thread\ntry:\n    pin_thread([1000])\nexcept OSError as error:\n    print(error.errno)"
    assert output_of(run_program(code)) == ["22"]
