"""`aioengine bench kernels`: every op against its reference, and against what the device could do at best.

The roofline of a call is the longer of two times: its bytes at the bandwidth, its arithmetic at the speed, both measured
here first. A working set that fits into a cache can beat it, which the table shows as more than 100 %. A variant whose
result is wrong gets no figure.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioengine.errors import AioEngineError, ConfigError
from aioengine_bench import console
from aioengine_bench.results import check_saving, environment, file_name, save_result, timestamp, with_metadata
from aioengine_bench.settings import KernelSettings

if TYPE_CHECKING:
    import torch

    from aioengine_bench.kernel_case import KernelCase


_RESULT_KEYS = ("date", "benchmark", "device", "threads", "bandwidth_gb_per_s", "gflops", "rows", "interrupted", "environment")
_ROOFLINE_KEYS = ("date", "benchmark", "rows", "interrupted", "environment")


@dataclass(frozen=True, slots=True)
class Roofline:
    """What the device reaches: bytes a second of a large copy (read and write), operations a second of a large product."""

    bytes_per_s: float
    flops_per_s: float

    def least_seconds(self, num_bytes: float, num_flops: float) -> float:
        return max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)


def kernels(settings: KernelSettings) -> None:
    """Run, print, save. Raises ConfigError for an unknown op or a device that is not there."""
    if settings.compile_report:
        _compile_report(settings)
        return
    import torch

    from aioengine.worker.worker import check_instruction_set

    check_instruction_set()
    if settings.roofline:
        _roofline(settings)
        return
    date = timestamp()
    device = _device(settings.device)
    default_name = file_name(["kernels", device.type], date)
    check_saving(settings.save, _RESULT_KEYS, default_name=default_name)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    interrupted = False
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        roofline = measure_roofline(device)
        try:
            for num_tokens in settings.num_tokens:
                for case in _selected(device, num_tokens, settings.ops):
                    rows += measure_case(case, roofline, min_time=settings.min_time, device=device)
        except KeyboardInterrupt:
            interrupted = True
    result = {
        "date": date,
        "benchmark": "kernels",
        "device": str(device),
        "threads": torch.get_num_threads(),
        "bandwidth_gb_per_s": roofline.bytes_per_s / 1e9,
        "gflops": roofline.flops_per_s / 1e9,
        "rows": rows,
        "interrupted": interrupted,
        "environment": environment(),
    }
    out = console.output_stream(stdout_is_taken=settings.save.claims_stdout)
    speeds = f"copies {roofline.bytes_per_s / 1e9:.1f} GB/s, multiplies {roofline.flops_per_s / 1e9:.0f} GFLOPS"
    head = f"{device}, {torch.get_num_threads()} threads: {speeds}"
    print(f"{head}\n{format_rows(rows)}", file=out)
    path = save_result(with_metadata(result, settings.save.metadata), settings.save, default_name=default_name)
    if path is not None:
        print(f"Saved to {path}", file=out)
    if interrupted:
        raise KeyboardInterrupt


def _device(name: str) -> torch.device:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda was asked for, but PyTorch finds no CUDA device")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _selected(device: torch.device, num_tokens: int, ops: Sequence[str]) -> list[KernelCase]:
    from aioengine_bench.kernel_cases import all_cases

    cases = all_cases(device, num_tokens)
    unknown = [name for name in ops if not any(case.op.startswith(name) for case in cases)]
    if unknown:
        raise ConfigError(f"no op {', '.join(unknown)}; there are: {', '.join(case.op for case in cases)}")
    return [case for case in cases if not ops or any(case.op.startswith(name) for name in ops)]


# ---------------------------------------------------------------------------------------------------- measuring
def measure_case(case: KernelCase, roofline: Roofline, *, min_time: float, device: torch.device) -> list[dict[str, Any]]:
    """One row for the reference and one for each variant. A red variant has its error, and no time."""
    least_s = roofline.least_seconds(case.num_bytes, case.num_flops)

    def row(variant: str, seconds: float | None, error: float, passed: bool) -> dict[str, Any]:
        return {
            "op": case.op,
            "num_tokens": case.num_tokens,
            "variant": variant,
            "error": error,
            "passed": passed,
            "time_us": seconds * 1e6 if seconds is not None else None,
            "speedup": reference_s / seconds if seconds is not None else None,
            "roofline_us": least_s * 1e6,
            "of_roofline": least_s / seconds if seconds is not None else None,
        }

    oracle = case.oracle()
    reference_s = time_call(case.reference, case.inputs(), min_time=min_time, device=device)
    rows = [row("reference", reference_s, relative_error(case.reference(case.inputs()), oracle), True)]
    for name, variant in case.variants.items():
        error = relative_error(variant.run(case.inputs()), oracle)
        passed = error <= variant.tolerance
        seconds = time_call(variant.run, case.inputs(), min_time=min_time, device=device) if passed else None
        rows.append(row(name, seconds, error, passed))
    return rows


def relative_error(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest, over the outputs, of the norm of the difference over the norm of the truth; infinite for a NaN."""
    worst = 0.0
    for got, want in zip(actual, expected, strict=True):
        difference = float((got.double() - want.double()).norm())
        scale = float(want.double().norm())
        error = difference / scale if scale else difference
        worst = max(worst, error if error == error else float("inf"))
    return worst


def time_call(op: Callable[[dict[str, Any]], object], inputs: dict[str, Any], *, min_time: float, device: torch.device) -> float:
    """Seconds of one call: the least over some rounds, as other jobs only ever add time."""
    op(inputs)  # whatever is made on first use
    start = time.perf_counter()
    op(inputs)
    _synchronize(device)
    once = max(time.perf_counter() - start, 1e-7)
    repeats = max(1, int(min_time / once / 5))
    best = float("inf")
    for _ in range(5 if min_time > once else 1):
        start = time.perf_counter()
        for _ in range(repeats):
            op(inputs)
        _synchronize(device)
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_roofline(device: torch.device) -> Roofline:
    """Bandwidth and arithmetic of the device, by a copy far larger than any cache and a large product."""
    import torch

    on_gpu = device.type == "cuda"
    source = torch.ones((1 << 30 if on_gpu else 1 << 26) // 4, device=device)
    target = torch.empty_like(source)
    copy_s = time_call(lambda _: target.copy_(source), {}, min_time=0.2, device=device)
    size = 8192 if on_gpu else 1024
    matrix = torch.ones(size, size, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    multiply_s = time_call(lambda _: matrix @ matrix, {}, min_time=0.5, device=device)
    return Roofline(2 * source.numel() * 4 / copy_s, 2 * size**3 / multiply_s)


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        verdict = "ok" if row["passed"] else "WRONG"
        speedup = "-" if row["variant"] == "reference" or row["speedup"] is None else f"{row['speedup']:.2f}x"
        of_roofline = "-" if row["of_roofline"] is None else f"{row['of_roofline']:.0%}"
        times = [console.number(row["time_us"], 1), console.number(row["roofline_us"], 1)]
        lines.append([row["op"], str(row["num_tokens"]), row["variant"], f"{row['error']:.1e}", verdict, *times, of_roofline, speedup])
    return console.table(["op", "tokens", "variant", "error", "check", "us", "roofline us", "of it", "speed-up"], lines)


# ---------------------------------------------------------------------------------------------------- the machine's limits
def _roofline(settings: KernelSettings) -> None:
    import torch

    from aioengine_bench.kernel_roofline import format_roofline, roofline_rows

    date = timestamp()
    default_name = file_name(["kernels", "roofline"], date)
    check_saving(settings.save, _ROOFLINE_KEYS, default_name=default_name)
    threads = [settings.threads] if settings.threads is not None else sorted({1, torch.get_num_threads()})
    rows: list[dict[str, Any]] = []
    interrupted = False
    try:
        # An interrupt leaves the rows so far.
        rows.extend(roofline_rows(num_tokens=settings.num_tokens, threads=threads, min_time=settings.min_time))
    except KeyboardInterrupt:
        interrupted = True
    result = {"date": date, "benchmark": "kernels roofline", "rows": rows, "interrupted": interrupted, "environment": environment()}
    out = console.output_stream(stdout_is_taken=settings.save.claims_stdout)
    print(format_roofline(rows), file=out)
    path = save_result(with_metadata(result, settings.save.metadata), settings.save, default_name=default_name)
    if path is not None:
        print(f"Saved to {path}", file=out)
    if interrupted:
        raise KeyboardInterrupt


# ---------------------------------------------------------------------------------------------------- ahead of time
def _compile_report(settings: KernelSettings) -> None:
    """In a process of its own: it puts a driver without a device into Triton. It prints, and saves nothing."""
    save = settings.save
    if save.saves or save.output_json not in (None, "-") or save.metadata or save.label is not None:
        raise ConfigError("--compile-report prints its report: of the result options only `--output-json -` has an effect on it")
    command = [sys.executable, "-m", "aioengine_kernels.compile_report"]
    for target in settings.targets:
        command += ["--target", target]
    if settings.save.claims_stdout:
        command.append("--json")
    environment_ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with contextlib.suppress(KeyboardInterrupt):
        status = subprocess.run(command, env=environment_, check=False).returncode
        if status:
            raise AioEngineError(f"the kernels did not compile: status {status}")
