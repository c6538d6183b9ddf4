"""Loading, choice of the instruction set, threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from aioengine_kernels.cpu import ISAS, CpuKernels, load_kernels, status, supported_isas
from aioengine_kernels.cpu.abi import declared_layout, layout_difference, library_layout
from aioengine_kernels.cpu.library import open_library
from aioengine_kernels.cpu.packing import pack_dense

pytestmark = pytest.mark.skipif(status() is not None, reason=str(status()))


def test_choice_of_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOENGINE_CPU_ISA", raising=False)
    assert load_kernels().isa == supported_isas()[-1]
    monkeypatch.setenv("AIOENGINE_CPU_ISA", "portable")
    assert load_kernels().isa == "portable"
    assert load_kernels(isa=supported_isas()[-1]).isa == supported_isas()[-1]
    with pytest.raises(ValueError, match="'sse9' is not available here"):
        load_kernels(isa="sse9")
    assert supported_isas()[0] == ISAS[0] == "portable"


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys, aioengine_kernels.cpu; print('torch' in sys.modules, 'ctypes' in sys.modules)"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": path})
    assert result.stdout.split() == ["False", "False"]


def test_without_a_library_there_is_a_reason() -> None:
    code = (
        "import aioengine_kernels.cpu.library as library\n"
        "library.__file__ = '/nowhere/library.py'\n"
        "print(library.status())\n"
        "try:\n    library.open_library()\nexcept RuntimeError as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert result.stdout.count("was not built") == 2


def test_calls_from_many_threads_at_once() -> None:
    """The pool has one user at a time; the others do their work themselves. Nobody waits, nobody gets a wrong result."""
    kernels = CpuKernels(num_threads=3)
    weight, x = torch.randn(320, 96), torch.randn(24, 96)
    packed = pack_dense(weight)
    want = kernels.linear(x, packed)
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: all(torch.equal(kernels.linear(x, packed), want) for _ in range(200)), range(4)))
    assert all(results)


def test_the_gil_is_released() -> None:
    kernels = CpuKernels(num_threads=1)
    packed, x = pack_dense(torch.randn(2048, 1024)), torch.randn(512, 1024)
    running = threading.Event()

    def work() -> None:
        running.set()
        for _ in range(3):
            kernels.linear(x, packed)

    worker = threading.Thread(target=work)
    worker.start()
    running.wait()
    turns = 0
    while worker.is_alive():
        turns += 1
        time.sleep(0)
    assert turns > 50


def test_the_pool_survives_a_fork() -> None:
    code = (
        "import os, torch\n"
        "torch.set_num_threads(1)\n"
        "from aioengine_kernels.cpu import CpuKernels\n"
        "from aioengine_kernels.cpu.packing import pack_dense\n"
        "kernels, packed, x = CpuKernels(num_threads=2), pack_dense(torch.ones(512, 64)), torch.ones(8, 64)\n"
        "kernels.linear(x, packed)\n"
        "child = os.fork()\n"
        "ok = bool((kernels.linear(x, packed) == 64).all())\n"
        "if child == 0:\n    os._exit(0 if ok else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0 and ok\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": os.pathsep.join(sys.path)})


def test_both_sides_of_the_interface_mean_the_same() -> None:
    """Every field of every structure, and nothing else, is where the library was compiled to find it."""
    assert library_layout(open_library()) == declared_layout()
    assert len(declared_layout()) > 100


@pytest.mark.parametrize("field", ["AttentionArgs.window", "Step.", "Layer.cache"])
def test_a_library_of_another_layout_is_refused(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {**library_layout(open_library()), field: 4}
    monkeypatch.setattr("aioengine_kernels.cpu.abi.library_layout", lambda library: moved)
    assert layout_difference(open_library()) == f"{field} is at 4 in the library and at {declared_layout()[field]} here"


@pytest.mark.alone
@pytest.mark.skipif("sys.platform != 'linux'")
def test_no_more_threads_take_part_than_a_call_may_use() -> None:
    """The pool keeps the helpers of a call that used more: they stay out of one that may use fewer."""
    code = (
        "import os, time, torch\n"
        "torch.set_num_threads(1)\n"
        "from aioengine_kernels.cpu import CpuKernels\n"
        "from aioengine_kernels.cpu.packing import pack_dense\n"
        "packed, x = pack_dense(torch.ones(2048, 1024)), torch.ones(512, 1024)\n"
        "threads = lambda: {int(tid) for tid in os.listdir('/proc/self/task')}\n"
        "cpu_s = lambda tid: time.clock_gettime((~tid << 3) | 6)\n"  # a thread's own clock
        "before = threads()\n"
        "CpuKernels(num_threads=4).linear(x, packed)\n"
        "helpers = sorted(threads() - before)\n"
        "for num_threads in (4, 2, 1):\n"
        "    kernels, used, total = CpuKernels(num_threads=num_threads), {tid: cpu_s(tid) for tid in helpers}, time.process_time()\n"
        "    while time.process_time() - total < 0.2:\n"
        "        kernels.linear(x, packed)\n"
        "    total = time.process_time() - total\n"
        "    shares = [(cpu_s(tid) - used[tid]) / total for tid in helpers]\n"
        "    print(num_threads, len(helpers), sum(share > 0.05 for share in shares))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    rows = [[int(word) for word in line.split()] for line in result.stdout.splitlines()]
    assert [(num_threads, num_helpers) for num_threads, num_helpers, _ in rows] == [(4, 3), (2, 3), (1, 3)]
    for num_threads, _, num_busy in rows:
        assert num_busy < num_threads, rows
    assert rows[0][2] > 0, "nobody helped: this test has seen nothing"
