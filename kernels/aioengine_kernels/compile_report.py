"""Compile every kernel ahead of time for the shapes of known models, without a GPU, and report what the compiler made of it.

The launches themselves run (`x_triton`, with meta tensors, which hold no data), against a driver that only knows its target: so
exactly the specializations that serving would launch are compiled, and a launch that read a value back to the host would fail.
Run as `python -m aioengine_kernels.compile_report [--target sm_90] [--model llama-3-8b] [--json]`, in a process
without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from aioengine_kernels.activation import silu_mul_triton
from aioengine_kernels.batch_inputs import BatchInputs, RequestTables, StepRows, batch_inputs_triton
from aioengine_kernels.draw_tokens import draw_tokens_triton
from aioengine_kernels.logprobs import token_logprobs_triton
from aioengine_kernels.paged_attention import paged_attention_triton
from aioengine_kernels.penalties import apply_penalties_triton
from aioengine_kernels.qk_norm_rope_cache import qk_norm_rope_cache_triton
from aioengine_kernels.reshape_and_cache import reshape_and_cache_triton
from aioengine_kernels.rms_norm import rms_norm_triton
from aioengine_kernels.rope import apply_rope_triton
from aioengine_kernels.top_k_top_p import top_k_top_p_triton
from aioengine_kernels.write_rows import write_rows_triton
from aioengine_kernels.zero_blocks import zero_blocks_triton


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that kernels depend on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    qk_norm: bool = False


MODELS: Final[Mapping[str, ModelShape]] = {
    "llama-3-8b": ModelShape(32, 8, 128, 4096, 14336, 128256),
    "qwen3-0.6b": ModelShape(16, 8, 128, 1024, 3072, 151936, qk_norm=True),
    "smollm2-135m": ModelShape(9, 3, 64, 576, 1536, 49152),
}

SHARED_MEMORY_LIMITS: Final[Mapping[str, int]] = {"sm_80": 166_912, "sm_86": 101_376, "sm_90": 232_448}
"""Bytes of shared memory that one program may use; the compiler does not check it."""

MAX_SPILL_BYTES: Final = 256
"""Stores and loads a thread that ptxas may add, of any kernel in any dtype: what a loop's invariants cost once, not its tiles."""


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One compiled kernel."""

    case: str
    kernel: str
    target: str
    num_warps: int
    num_registers: int  # a thread; at most 255
    spill_bytes: int  # stores and loads that ptxas added a thread, as registers ran out
    shared_memory: int  # bytes a program
    tensor_core: Mapping[str, int]  # instruction -> how often it stands in the code
    vector_loads: int  # 16-byte global loads and asynchronous copies

    @property
    def excess(self) -> str | None:
        """What is over its limit; None if nothing is."""
        limit = SHARED_MEMORY_LIMITS[self.target]
        if self.spill_bytes > MAX_SPILL_BYTES:
            return f"{self.case}, {self.kernel}, {self.target}: {self.spill_bytes} bytes spilled, the limit is {MAX_SPILL_BYTES}"
        if self.shared_memory > limit:
            return f"{self.case}, {self.kernel}, {self.target}: {self.shared_memory} bytes of shared memory, the limit is {limit}"
        return None


class _CompileOnlyDriver:
    """Stands for Triton's GPU driver; each target is its own device, as compiled kernels are kept by device."""

    def __init__(self, target: Any, device: int) -> None:
        self._target = target
        self._device = device

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def is_active(self) -> bool:
        return True


@contextlib.contextmanager
def compile_only(target: str) -> Iterator[list[Any]]:
    """Inside, launching a kernel compiles it for `target` ("sm_90") instead; yields the list that collects what was compiled."""
    import triton
    from triton.backends.compiler import GPUTarget

    if triton.knobs.runtime.interpret:
        raise RuntimeError("kernels cannot be compiled in a process that set TRITON_INTERPRET")
    capability = int(target.removeprefix("sm_"))
    compiled: list[Any] = []
    launch = triton.JITFunction.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        compiled.append(kernel)
        return kernel

    driver = triton.runtime.driver
    before = driver._active  # reading `driver.active` would look for a GPU
    driver.set_active(_CompileOnlyDriver(GPUTarget("cuda", capability, 32), capability))
    triton.JITFunction.run = compile_instead
    try:
        yield compiled
    finally:
        triton.JITFunction.run = launch
        driver.set_active(before)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


_int = partial(_meta, dtype=torch.int32)
_long = partial(_meta, dtype=torch.int64)
_float = partial(_meta, dtype=torch.float32)


def _cache(shape: ModelShape, block_size: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    kv = _meta(4096, 2, block_size, shape.num_kv_heads, shape.head_dim, dtype=dtype)
    return kv[:, 0], kv[:, 1]


def _attention(
    shape: ModelShape,
    *,
    num_reqs: int,
    query_len: int,
    seq_len: int = 8192,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    **options: Any,
) -> None:
    key_cache, value_cache = _cache(shape, block_size, cache_dtype or dtype)
    paged_attention_triton(
        _meta(num_reqs * query_len, shape.num_heads, shape.head_dim, dtype=dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=_int(num_reqs, 512),
        seq_lens=_int(num_reqs),
        query_start_loc=_int(num_reqs + 1),
        max_query_len=query_len,
        max_seq_len=seq_len,
        scale=shape.head_dim**-0.5,
        **options,
    )


def _batch_inputs(shape: ModelShape) -> None:
    tables = RequestTables(token_table=_int(256, 8192), block_table=_int(1, 256, 512), last_sampled_tokens=_int(256))
    rows = StepRows(
        idx_mapping=_int(64),
        query_start_loc=_int(65),
        num_computed_tokens=_int(64),
        num_table_tokens=_int(64),
        kv_start_loc=_int(1, 65),
        segment_len=_int(1),
    )
    out = BatchInputs(
        input_ids=_long(8192),
        positions=_long(8192),
        slot_mapping=_long(1, 8192),
        seq_lens=_int(256),
        logits_indices=_long(256),
        block_table=_int(1, 256, 512),
        kv_start_loc=_int(1, 260)[:, :257],
        segment_len=_int(1, 4)[:, :1],
    )
    batch_inputs_triton(tables, rows, out, block_size=16, max_query_len=1)


def _reshape_and_cache(shape: ModelShape, dtype: torch.dtype = torch.bfloat16) -> None:
    key_cache, value_cache = _cache(shape, 16, dtype)
    key = _meta(64, shape.num_kv_heads, shape.head_dim)
    reshape_and_cache_triton(key, key, key_cache=key_cache, value_cache=value_cache, slot_mapping=_long(64), k_scale=0.5, v_scale=0.5)


def _qk_norm_rope_cache(shape: ModelShape) -> None:
    key_cache, value_cache = _cache(shape, 16)
    weight = _meta(shape.head_dim) if shape.qk_norm else None
    qk_norm_rope_cache_triton(
        _meta(64, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim),
        num_heads=shape.num_heads,
        positions=_long(64),
        cos_sin_cache=_float(8192, shape.head_dim),
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=_long(64),
        query_weight=weight,
        key_weight=weight,
    )


def _rope(shape: ModelShape) -> None:
    query, key = _meta(64, shape.num_heads, shape.head_dim), _meta(64, shape.num_kv_heads, shape.head_dim)
    apply_rope_triton(query, key, positions=_long(64), cos_sin_cache=_float(8192, shape.head_dim))


def _penalties(shape: ModelShape) -> None:
    apply_penalties_triton(
        _float(64, shape.vocab_size),
        prompt_mask=_meta(256, shape.vocab_size, dtype=torch.int8),
        output_counts=_int(256, shape.vocab_size),
        idx_mapping=_int(64),
        repetition=_float(64),
        frequency=_float(64),
        presence=_float(64),
    )


def _top_k_top_p(shape: ModelShape) -> None:
    top_k_top_p_triton(_float(64, shape.vocab_size), temperature=_float(64), top_k=_int(64), top_p=_float(64), min_p=_float(64))


def _draw_tokens(shape: ModelShape) -> None:
    draw_tokens_triton(
        _float(64, shape.vocab_size),
        temperature=_float(64),
        seeds=_long(64),
        indices=_int(64),
        idx_mapping=_int(64),
        last_sampled_tokens=_int(256),
    )


def _cases(name: str, shape: ModelShape) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The launches of a step of this model; those of the first model only where the sizes do not matter."""
    yield "attention decode x64", partial(_attention, shape, num_reqs=64, query_len=1)
    yield "attention decode x1 split", partial(_attention, shape, num_reqs=1, query_len=1)
    yield "attention chunk of 512", partial(_attention, shape, num_reqs=4, query_len=512)
    yield "attention chunk x1 split", partial(_attention, shape, num_reqs=1, query_len=40, seq_len=32768)
    yield "qk_norm_rope_cache", partial(_qk_norm_rope_cache, shape)
    yield (
        "rms_norm + residual",
        partial(rms_norm_triton, _meta(64, shape.hidden_size), _meta(shape.hidden_size), eps=1e-5, residual=_meta(64, shape.hidden_size)),
    )
    yield "silu_mul", partial(silu_mul_triton, _meta(64, 2 * shape.intermediate_size))
    yield "reshape_and_cache", partial(_reshape_and_cache, shape)
    yield "apply_rope", partial(_rope, shape)
    yield "draw_tokens", partial(_draw_tokens, shape)
    if name == "llama-3-8b":
        yield "attention decode x64 float32", partial(_attention, shape, num_reqs=64, query_len=1, dtype=torch.float32)
        yield "attention chunk of 512 float32", partial(_attention, shape, num_reqs=4, query_len=512, dtype=torch.float32)
        yield "batch_inputs", partial(_batch_inputs, shape)
        yield "write_rows", partial(write_rows_triton, _int(256, 8192), _int(4, 4), _int(2048), max_length=2048)
        yield "zero_blocks", partial(zero_blocks_triton, _cache(shape, 16)[0], _int(8))
        yield "apply_penalties", partial(_penalties, shape)
        yield "top_k_top_p", partial(_top_k_top_p, shape)
        yield "token_logprobs", partial(token_logprobs_triton, _float(64, shape.vocab_size), _long(64, 21))


def _fp8_cases(shape: ModelShape) -> Iterator[tuple[str, Callable[[], Any]]]:
    """An fp8 cache, which needs compute capability 8.9."""
    fp8 = torch.float8_e4m3fn
    yield "reshape_and_cache fp8", partial(_reshape_and_cache, shape, fp8)
    yield "attention decode x64 fp8", partial(_attention, shape, num_reqs=64, query_len=1, cache_dtype=fp8, k_scale=0.5, v_scale=0.5)
    yield "attention chunk of 512 fp8", partial(_attention, shape, num_reqs=4, query_len=512, cache_dtype=fp8)


def _hard_cases(shape: ModelShape) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Options and shapes outside the main models: window, soft cap, wide and odd heads in every dtype, large blocks."""
    options: dict[str, Any] = {"sliding_window": 1024, "logits_soft_cap": 50.0}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        yield f"attention decode window cap {name}", partial(_attention, shape, num_reqs=64, query_len=1, dtype=dtype, **options)
        yield f"attention chunk window cap {name}", partial(_attention, shape, num_reqs=4, query_len=512, dtype=dtype, **options)
        for head_dim in (64, 80, 96, 128, 256):
            wide = ModelShape(16, 8, head_dim, 2048, 8192, 32000)
            yield f"attention decode d{head_dim} {name}", partial(_attention, wide, num_reqs=64, query_len=1, block_size=256, dtype=dtype)
            yield f"attention chunk d{head_dim} {name}", partial(_attention, wide, num_reqs=4, query_len=512, dtype=dtype)


def _resource_usage(ptx: str, target: str) -> tuple[int, int]:
    """Registers a thread and bytes of spill stores and loads, as ptxas tells them."""
    import triton

    binaries = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    match = re.search(r"\.target (sm_\w+)", ptx)
    architecture = match.group(1) if match else target
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(binaries / "ptxas"), "-v", f"-arch={architecture}", str(source), "-o", str(source.with_suffix(".cubin"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = sum(int(amount) for amount in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    return int(registers.group(1)) if registers else 0, spills


def _describe(case: str, target: str, kernel: Any) -> KernelReport:
    ptx = kernel.asm["ptx"]
    registers, spills = _resource_usage(ptx, target)
    counts = {"wgmma": len(re.findall(r"wgmma\.mma_async", ptx)), "mma": len(re.findall(r"\bmma\.sync", ptx))}
    return KernelReport(
        case=case,
        kernel=kernel.metadata.name,
        target=target,
        num_warps=kernel.metadata.num_warps,
        num_registers=registers,
        spill_bytes=spills,
        shared_memory=kernel.metadata.shared,
        tensor_core={name: count for name, count in counts.items() if count},
        vector_loads=len(re.findall(r"ld\.global\.\S*v4|cp\.async\.cg", ptx)),
    )


def compile_all(
    *, targets: Iterable[str] = ("sm_80", "sm_90"), models: Iterable[str] = tuple(MODELS), hard_cases: bool = False
) -> list[KernelReport]:
    """Compile every launch of the given models for every target. Raises what the compiler raises."""
    reports: dict[tuple[str, str, str], KernelReport] = {}
    for target in targets:
        with compile_only(target) as compiled:
            for name in models:
                cases = list(_cases(name, MODELS[name]))
                if name == "llama-3-8b":
                    cases += _fp8_cases(MODELS[name]) if int(target.removeprefix("sm_")) >= 89 else ()
                    cases += _hard_cases(MODELS[name]) if hard_cases else ()
                for case, launch in cases:
                    compiled.clear()
                    launch()
                    for kernel in compiled:
                        report = _describe(f"{name}: {case}", target, kernel)
                        reports[report.case, report.kernel, target] = report
    return list(reports.values())


def format_table(reports: Iterable[KernelReport]) -> str:
    """The reports as a table, one line a kernel."""
    lines = [f"{'case':42} {'kernel':28} {'target':6} {'warps':>5} {'regs':>4} {'spill':>5} {'shared':>7} {'vec16':>5}  tensor cores"]
    for r in reports:
        units = " ".join(f"{name} x{count}" for name, count in r.tensor_core.items())
        lines.append(
            f"{r.case:42} {r.kernel:28} {r.target:6} {r.num_warps:5} {r.num_registers:4} {r.spill_bytes:5} "
            f"{r.shared_memory:7} {r.vector_loads:5}  {units}".rstrip()
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command line: print the table, or JSON with --json; status 1 if a kernel spills, or shares memory, beyond its limit."""
    parser = argparse.ArgumentParser(prog="compile_report", description="Compile the kernels ahead of time and report their resources.")
    parser.add_argument("--target", action="append", choices=sorted(SHARED_MEMORY_LIMITS), help="default: sm_80 and sm_90")
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="default: all")
    parser.add_argument("--hard-cases", action="store_true", help="also windows, soft caps and unusual head sizes")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of the table")
    options = parser.parse_args(arguments)
    reports = compile_all(
        targets=options.target or ("sm_80", "sm_90"), models=options.model or tuple(MODELS), hard_cases=options.hard_cases
    )
    print(json.dumps([asdict(report) for report in reports]) if options.json else format_table(reports))
    excesses = [report.excess for report in reports if report.excess is not None]
    print("\n".join(excesses), file=sys.stderr, end="\n" if excesses else "")
    return 1 if excesses else 0


if __name__ == "__main__":
    sys.exit(main())
