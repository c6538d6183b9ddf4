"""What the launcher hands to the driver is what Triton would, against a driver that only takes notes: there may be no GPU here."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel

from aioengine_kernels.compile_report import _CompileOnlyDriver
from aioengine_kernels.flash_decoding import _reduce_segments_kernel, reduce_segments_triton
from aioengine_kernels.launcher import Kernel
from aioengine_kernels.rms_norm import _rms_norm_kernel, rms_norm_triton

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter")
Launch = tuple[Any, ...]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """What reached the driver: grid, stream, and the arguments, with addresses for tensors. Variants are forgotten before and after."""
    notes: list[Launch] = []

    def run(*arguments: Any) -> None:
        addresses = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        notes.append((*addresses[:6], *addresses[9:]))  # without what profilers hang into a launch

    def load(kernel: CompiledKernel) -> None:
        kernel.function, kernel._run = f"handle of {kernel.name}", run

    monkeypatch.setattr(CompiledKernel, "_init_handles", load)
    kernels: list[Any] = [_rms_norm_kernel, _reduce_segments_kernel]
    for kernel in kernels:
        monkeypatch.setattr(kernel, "_variants", {})
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(_CompileOnlyDriver(GPUTarget("cuda", 90, 32), 90))
    yield notes
    driver.set_active(before)
    for kernel in kernels:
        kernel.function.device_caches.pop(90, None)  # its compiled kernels hold the notes


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched through Triton."""
    names: list[str] = []
    launch = triton.JITFunction.run

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        names.append(self.fn.__name__)
        return launch(self, *args, **options)

    monkeypatch.setattr(triton.JITFunction, "run", noted)
    return names


def test_the_second_launch_is_the_first_without_triton(launches: list[Launch], by_triton: list[str]) -> None:
    x, weight = torch.zeros(5, 64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
    outs = [rms_norm_triton(x, weight, eps=1e-5) for _ in range(3)]  # kept, so that each has an address of its own
    assert by_triton == ["_rms_norm_kernel"]
    assert len(launches) == 3
    for launch, out in zip(launches, outs, strict=True):
        expected = list(launches[0])
        expected[expected.index(outs[0].data_ptr())] = out.data_ptr()
        assert list(launch) == expected
    assert _rms_norm_kernel.num_variants == 1


def test_counts_make_no_variant_and_what_is_compiled_for_does(launches: list[Launch], by_triton: list[str]) -> None:
    def reduce(num_segments: int, num_tokens: int, dtype: torch.dtype) -> None:
        partial, maxima = torch.zeros(num_segments, num_tokens, 2, 64), torch.zeros(num_segments, num_tokens, 2)
        reduce_segments_triton(partial, maxima, maxima.clone(), out=torch.zeros(num_tokens, 2, 64, dtype=dtype))

    for num_segments, num_tokens in ((2, 1), (16, 16), (3, 5), (1, 32)):
        reduce(num_segments, num_tokens, torch.bfloat16)
    assert len(by_triton) == 1
    reduce(2, 1, torch.float16)
    reduce(3, 1, torch.float16)
    assert len(by_triton) == 2
    assert _reduce_segments_kernel.num_variants == 2
    assert len(launches) == 6


def test_an_address_that_is_no_multiple_of_16_goes_by_triton(launches: list[Launch], by_triton: list[str]) -> None:
    weight = torch.zeros(64)
    base = torch.zeros(5 * 64 + 1)
    rms_norm_triton(base[:-1].view(5, 64), weight, eps=1e-5)
    for _ in range(3):
        rms_norm_triton(base[1:].view(5, 64), weight, eps=1e-5)
    rms_norm_triton(base[:-1].view(5, 64), weight, eps=1e-5)
    assert len(by_triton) == 4
    assert len(launches) == 5


def test_a_count_that_is_no_32_bit_integer_is_refused(launches: list[Launch]) -> None:
    maxima = torch.zeros(2, 1, 2)
    with pytest.raises(OverflowError, match="a count of 2147483648 is no 32-bit integer"):
        reduce_segments_triton(torch.zeros(2, 1, 2, 64), maxima, maxima, out=torch.zeros(1, 2, 64), first_token=1 << 31)
    assert launches == []


def test_a_direct_launch_costs_less_than_triton_s_own(launches: list[Launch]) -> None:
    """By the clock, so by far: a third here."""
    x, weight, out = torch.zeros(5, 64), torch.zeros(64), torch.zeros(5, 64)
    arguments = (x, x, weight, out, 64, 64, 64, 64, 1e-5, 0.0)
    constants: dict[str, Any] = {"HAS_RESIDUAL": False, "BLOCK": 64, "num_warps": 1}
    kernel: Kernel = _rms_norm_kernel
    kernel.launch((5,), *arguments, **constants)

    def seconds(launch: Any) -> float:
        best = float("inf")
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(50):
                launch()
            best = min(best, time.perf_counter() - start)
        return best

    direct = seconds(lambda: kernel.launch((5,), *arguments, **constants))
    by_triton = seconds(lambda: kernel.function[(5,)](*arguments, **constants))
    assert direct < by_triton / 1.5
