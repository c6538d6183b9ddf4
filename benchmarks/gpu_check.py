"""Everything that could not be checked without a GPU, in one command of a few minutes:

    python benchmarks/gpu_check.py [--json gpu_check.json]

Runs from a plain checkout, with nothing installed but torch, triton, numpy and transformers, and downloads nothing: weights are
random. It checks every Triton kernel against its reference, also on rows of NaN; the engine's greedy tokens in eager steps, in CUDA
graphs, one step at a time and on the CPU, over 2,000 steps with preemptions and aborts; filters, log-probabilities, penalties, a
grammar's masks, a NaN row and a long context through the engine; that no call waits for the device and nothing is compiled while
serving. Then it measures the speed of models of the shapes of Qwen3-0.6B and Llama-3-8B. The table comes last; exit status 0 means
that every check passed, 1 that one did not, 2 that there is no GPU.

--rehearse runs the same script on a CPU with tiny models in Triton's interpreter: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]
if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import torch  # noqa: E402

from aioengine.worker.device import InterpreterDevice  # noqa: E402
from gpu_checks.bandwidth import AttentionSpeed, attention_speed, copy_bandwidth  # noqa: E402
from gpu_checks.engine import (  # noqa: E402
    CHECKED,
    LLAMA_3_8B,
    QWEN3_0_6B,
    TINY,
    RandomEngine,
    Run,
    Shape,
    TokenCheck,
    compare_tokens,
    logit_gap,
    random_prompts,
)
from gpu_checks.kernels import KernelCheck, Sizes, check_kernels  # noqa: E402
from gpu_checks.serving import ServingCheck, ServingSizes, check_long_runs, check_serving  # noqa: E402


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run, and how large."""

    device: str
    sizes: Sizes
    checked: Shape
    models: dict[str, Shape]
    dtype: str  # of the measured models
    batches: tuple[int, ...]
    prompt_len: int
    num_decode_tokens: int
    prefill: tuple[int, int]  # prompts, tokens each
    contexts: tuple[tuple[int, ...], ...]  # the cached positions of requests that decode together: for the bandwidth of attention
    copy_bytes: int
    serving: ServingSizes
    serving_options: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


GPU_PLAN = Plan(
    device="cuda",
    sizes=Sizes(),
    checked=CHECKED,
    models={"0.6B": QWEN3_0_6B, "8B": LLAMA_3_8B},
    dtype="bfloat16",
    batches=(1, 32, 256),
    prompt_len=512,
    num_decode_tokens=64,
    prefill=(16, 2048),
    contexts=((8192,), (8192,) * 32, (1024,) * 256, (131072, *(1024,) * 33)),
    copy_bytes=4 << 30,
    serving=ServingSizes(long_context=8000, num_companions=12, num_soak_requests=120, soak_steps=2000, sync_steps=200, max_tokens=24),
    serving_options={"max_num_seqs": 6, "max_model_len": 8192, "num_kv_cache_blocks": 800, "max_num_batched_tokens": 512},
    options={"max_num_seqs": 256, "max_model_len": 4096, "max_num_batched_tokens": 8192},
)
REHEARSAL = Plan(
    device="cpu",
    sizes=Sizes(head_dims=(32,), vocab_size=3000, long_context=600, hidden_size=100, dtypes=(torch.float32,), heads=(4, 2)),
    checked=TINY,
    models={"tiny": TINY},
    dtype="float32",
    batches=(2,),
    prompt_len=12,
    num_decode_tokens=3,
    prefill=(1, 20),
    contexts=((64, 3),),
    copy_bytes=1 << 20,
    serving=ServingSizes(long_context=262, num_companions=2, num_soak_requests=5, soak_steps=6, sync_steps=2, max_tokens=2),
    serving_options={"max_num_seqs": 6, "max_model_len": 272, "num_kv_cache_blocks": 60, "max_num_batched_tokens": 270},
    options={"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 64, "num_kv_cache_blocks": 20},
)


@dataclass(slots=True)
class Report:
    """Everything that was found; the JSON file holds it whole."""

    environment: dict[str, Any]
    kernels: list[KernelCheck] = field(default_factory=list)
    tokens: list[TokenCheck] = field(default_factory=list)
    serving: list[ServingCheck] = field(default_factory=list)
    copy_gb_per_s: float = 0.0
    attention: list[AttentionSpeed] = field(default_factory=list)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # by part: what was raised
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        groups = (self.kernels, self.tokens, self.serving)
        return not self.failures and all(check.passed for group in groups for check in group)


def describe_environment(device: str) -> dict[str, Any]:
    import triton

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, Triton's interpreter: a rehearsal"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    return {"device": name, **versions, "cuda": torch.version.cuda}


def check_tokens(plan: Plan) -> list[TokenCheck]:
    """The same weights and requests on the CPU and on the device, with chunked prompts, and blocks for a few requests only."""
    is_gpu = plan.device == "cuda"
    vocab_size = plan.checked["vocab_size"]
    num_prompts, num_tokens = (6, 24) if is_gpu else (3, 4)
    prompts = [random_prompts(1, 5 + 9 * i, vocab_size=vocab_size, seed=i)[0] for i in range(num_prompts)]
    small: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 16, "same_everywhere": True}
    # So few blocks that requests are preempted.
    small |= {"max_model_len": 128, "num_kv_cache_blocks": 13} if is_gpu else {"max_model_len": 48, "num_kv_cache_blocks": 4}
    cpu = RandomEngine(plan.checked, device="cpu", dtype="float32", attention_backend="torch_paged", **small)
    cpu.start()
    expected = cpu.run(prompts, max_tokens=num_tokens)
    gap = logit_gap(cpu)
    checks: list[TokenCheck] = []
    # In bfloat16 the logits, which are around 1, carry an error of some hundredths.
    for dtype, limit in [("float32", 1e-3)] + ([("bfloat16", 0.3)] if is_gpu else []):
        gpu = RandomEngine(plan.checked, device=plan.device, dtype=dtype, attention_backend="triton", **small)
        gpu.start()
        runs: dict[str, Run] = {}
        if is_gpu:
            runs[f"{gpu.num_graphs} graphs"] = gpu.run(prompts, max_tokens=num_tokens)
            gpu.use_graphs(False)
            runs["eager, no overlap"] = gpu.run(prompts, max_tokens=num_tokens, overlap=False)
        runs["eager"] = gpu.run(prompts, max_tokens=num_tokens)
        if dtype == "float32":
            gpu.use_graphs(True)
            checks += check_long_runs(gpu, gap=gap, sizes=plan.serving, limit=limit)
        gpu.stop()
        for name, run in runs.items():
            checks.append(compare_tokens(f"{dtype}, {name}", expected, run, prompts=prompts, gap=gap, limit=limit))
    cpu.stop()
    return checks


def check_features(plan: Plan) -> list[ServingCheck]:
    """What else serving has to do, in float32 on both devices, with room for a long context."""
    options: dict[str, Any] = {**plan.serving_options, "long_prefill_token_threshold": 256, "same_everywhere": True}
    cpu = RandomEngine(plan.checked, device="cpu", dtype="float32", attention_backend="torch_paged", **options)
    gpu = RandomEngine(plan.checked, device=plan.device, dtype="float32", attention_backend="triton", **options)
    cpu.start()
    # Warmed up as on a GPU also in a rehearsal, or what is compiled while serving could not be told.
    InterpreterDevice.compiles_kernels = True
    gpu.start()
    checks: list[ServingCheck] = []
    for check in check_serving(gpu, cpu, gap=logit_gap(cpu), sizes=plan.serving, limit=5e-3):
        checks.append(check)
        if not check.passed:
            print(f"  FAILED {check.name}: {check.message}", flush=True)
    gpu.stop()
    cpu.stop()
    return checks


def measure_model(plan: Plan, shape: Shape) -> dict[str, Any]:
    """Decode step times, prefill throughput, the host's time, and what overlap and graphs gain."""
    engine = RandomEngine(shape, device=plan.device, dtype=plan.dtype, attention_backend="triton", **plan.options)
    engine.start()
    result: dict[str, Any] = {"start_s": engine.start_seconds, "num_kv_cache_blocks": engine.num_blocks, "decode": {}}
    length, num_tokens = plan.prompt_len, plan.num_decode_tokens
    for batch in plan.batches:
        prompts = random_prompts(batch, length, vocab_size=engine.vocab_size)
        run = engine.run(prompts, max_tokens=num_tokens)
        result["decode"][batch] = {"step_ms": run.decode_step_seconds() * 1e3}
        result["decode"][batch]["host_ms"] = {name: seconds * 1e3 for name, seconds in run.host_seconds_per_step().items()}
        without = engine.run(prompts, max_tokens=num_tokens, overlap=False)
        result["decode"][batch]["no_overlap_step_ms"] = without.decode_step_seconds() * 1e3
        engine.use_graphs(False)
        result["decode"][batch]["eager_step_ms"] = engine.run(prompts, max_tokens=num_tokens).decode_step_seconds() * 1e3
        engine.use_graphs(True)
    num_prompts, prompt_len = plan.prefill
    prompts = random_prompts(num_prompts, prompt_len, vocab_size=engine.vocab_size)
    engine.run(prompts, max_tokens=1)  # compiles what is new
    result["prefill_tokens_per_s"] = num_prompts * prompt_len / engine.run(prompts, max_tokens=1).seconds()
    if plan.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        result["memory_share"] = 1 - free / total  # held to gpu_memory_utilization
    engine.stop()
    return result


PARTS = ("kernels", "tokens", "serving", "bandwidth", "speed")


def run_all(plan: Plan, parts: Sequence[str], *, save: Callable[[Report], None]) -> Report:
    """The parts in order. One that raises has failed, and the next ones run; what was found so far is saved after each."""
    report = Report(describe_environment(plan.device))
    steps: list[tuple[str, Callable[[Plan, Report], None]]] = [
        ("kernels", _run_kernels),
        ("tokens", lambda plan, report: report.tokens.extend(check_tokens(plan))),
        ("serving", lambda plan, report: report.serving.extend(check_features(plan))),
        ("bandwidth", _run_bandwidth),
        ("speed", _run_speed),
    ]
    for name, run in steps:
        if name not in parts:
            continue
        begin = time.perf_counter()
        try:
            run(plan, report)
        except Exception:  # whatever a device comes up with: the other parts are still worth a look
            report.failures[name] = traceback.format_exc()
            print(f"  FAILED {name}\n{report.failures[name]}", flush=True)
        report.seconds[name] = time.perf_counter() - begin
        print(f"  {name}: {report.seconds[name]:.1f} s", flush=True)
        save(report)
    return report


def _run_kernels(plan: Plan, report: Report) -> None:
    for check in check_kernels(torch.device(plan.device), plan.sizes):
        report.kernels.append(check)
        if not check.passed:
            print(f"  FAILED {check.name}: error {check.error:g}, limit {check.limit:g} {check.message}", flush=True)


def _run_bandwidth(plan: Plan, report: Report) -> None:
    device = torch.device(plan.device)
    report.copy_gb_per_s = copy_bandwidth(device, num_bytes=plan.copy_bytes) / 1e9
    for lengths in plan.contexts:
        speed = attention_speed(device, lengths=lengths, copy_bytes_per_s=report.copy_gb_per_s * 1e9)
        report.attention.append(speed)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _run_speed(plan: Plan, report: Report) -> None:
    for name, shape in plan.models.items():
        report.models[name] = measure_model(plan, shape)


def format_report(report: Report) -> str:
    """The short table."""
    env = report.environment
    lines = [f"{env['device']}: torch {env['torch']}, triton {env['triton']}, CUDA {env['cuda']}, Python {env['python']}"]
    failed = [check.name for check in report.kernels if not check.passed]
    lines.append(f"kernels: {len(report.kernels) - len(failed)} of {len(report.kernels)} as their references{_list(failed)}")
    for check in report.tokens:
        verdict = "ok" if check.passed else "FAILED"
        parting = f"where they part {check.worst_gap:.2g} below the best logit, limit {check.limit:g}"
        lines.append(f"tokens as on the CPU, {check.name}: {verdict}, {check.num_equal} of {check.num_tokens} equal; {parting}")
    lines += [f"{feature.name}: {'ok' if feature.passed else 'FAILED'}; {feature.message}" for feature in report.serving]
    lines.append(f"copy: {report.copy_gb_per_s:.0f} GB/s")
    for speed in report.attention:
        of_copy = f"{speed.gb_per_s:.0f} GB/s, {speed.share_of_copy:.0%} of the copy"
        lines.append(f"attention of {speed.num_reqs} decodes of up to {speed.context}: {speed.microseconds:.1f} us a layer, {of_copy}")
    lines.append(f"{'model':6} {'batch':>5} {'step ms':>8} {'eager ms':>9} {'no overlap ms':>14} {'overlap gain':>13}  host ms a step")
    for name, model in report.models.items():
        for batch, row in model["decode"].items():
            gain = 1 - row["step_ms"] / row["no_overlap_step_ms"]
            host = ", ".join(f"{part} {value:.2f}" for part, value in row["host_ms"].items())
            times = f"{row['step_ms']:8.2f} {row['eager_step_ms']:9.2f} {row['no_overlap_step_ms']:14.2f} {gain:13.0%}"
            lines.append(f"{name:6} {batch:5} {times}  {host}")
        blocks = f"{model['num_kv_cache_blocks']} KV blocks, started in {model['start_s']:.1f} s"
        blocks += f", {model['memory_share']:.1%} of the memory taken" if "memory_share" in model else ""
        lines.append(f"{name:6} prefill {model['prefill_tokens_per_s']:.0f} tokens/s; {blocks}")
    lines += [f"{name}: FAILED, {failure.splitlines()[-1]}" for name, failure in report.failures.items()]
    lines.append("every check passed" if report.passed else "SOME CHECKS FAILED")
    return "\n".join(lines)


def _list(names: list[str]) -> str:
    return f"; FAILED: {', '.join(names)}" if names else ""


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is no part; the parts are {', '.join(PARTS)}")
    return names


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where everything is written (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny models; figures mean nothing")
    parts = f"comma-separated, of {', '.join(PARTS)} (default: all)"
    parser.add_argument("--parts", type=_parts, default=PARTS, metavar="NAMES", help=parts)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="  %(name)s: %(message)s")
    if options.rehearse:
        from aioengine_kernels import interpreter

        interpreter.install()
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        print(f"gpu_check: PyTorch {torch.__version__} finds no CUDA device; nothing was checked (--rehearse runs on a CPU)")
        return 2

    def save(report: Report) -> None:
        options.json.write_text(json.dumps({**asdict(report), "passed": report.passed}, indent=1) + "\n")

    report = run_all(REHEARSAL if options.rehearse else GPU_PLAN, options.parts, save=save)
    print(f"\n{format_report(report)}\n(all figures: {options.json})")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
