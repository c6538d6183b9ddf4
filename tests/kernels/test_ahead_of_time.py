"""Every kernel compiled for sm_80 and sm_90 without a GPU, and limits on what the compiler made of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from aioengine_kernels.compile_report import MAX_SPILL_BYTES, SHARED_MEMORY_LIMITS, KernelReport

KERNELS = Path(__file__).parents[2] / "kernels"
ATTENTION = "_paged_attention_kernel"


def compile_report(*arguments: str) -> list[dict[str, Any]]:
    """The report's JSON, from a process that does not interpret kernels. Its status is 0: nothing is beyond its limits."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(KERNELS)
    command = [sys.executable, "-m", "aioengine_kernels.compile_report", "--json", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-8_000:]
    reports: list[dict[str, Any]] = json.loads(result.stdout)
    return reports


def check_limits(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        name = f"{report['case']} {report['kernel']} {report['target']}"
        assert report["shared_memory"] <= SHARED_MEMORY_LIMITS[report["target"]], name
        assert report["num_registers"] <= 255, name
        # A program of 16 warps needs its registers on one SM: 65536 of them.
        assert report["num_registers"] * report["num_warps"] * 32 <= 65_536, name
        if report["kernel"] == ATTENTION:
            assert report["tensor_core"], name
            assert report["vector_loads"] > 0, name


@pytest.fixture(scope="module")
def main_reports() -> list[dict[str, Any]]:
    return compile_report("--model", "llama-3-8b")


@pytest.mark.timeout(600)
def test_the_kernels_compile_within_limits(main_reports: list[dict[str, Any]]) -> None:
    check_limits(main_reports)
    for target in ("sm_80", "sm_90"):
        kernels = {report["kernel"] for report in main_reports if report["target"] == target}
        assert kernels == {
            "_apply_penalties_kernel",
            "_apply_rope_kernel",
            "_batch_inputs_kernel",
            "_gated_activation_kernel",
            "_draw_kernel",
            "_paged_attention_kernel",
            "_qk_norm_rope_cache_kernel",
            "_reduce_segments_kernel",
            "_reshape_and_cache_kernel",
            "_rms_norm_kernel",
            "_token_logprobs_kernel",
            "_top_k_top_p_kernel",
            "_weigh_chunks_kernel",
            "_write_rows_kernel",
            "_zero_blocks_kernel",
        }


@pytest.mark.timeout(600)
def test_nothing_spills_in_the_main_configurations(main_reports: list[dict[str, Any]]) -> None:
    """Float32 has a bound of its own, which the command itself holds for every kernel in any dtype."""
    spilling = {report["case"]: report["spill_bytes"] for report in main_reports if report["spill_bytes"]}
    assert all("float32" in case for case in spilling), spilling
    assert all(spilled <= MAX_SPILL_BYTES for spilled in spilling.values())


def test_a_kernel_beyond_its_limits_is_named() -> None:
    """What float32 attention was before it had a plan of its own, and a tile that fits no program."""
    fine = KernelReport("chunk", ATTENTION, "sm_80", 8, 255, MAX_SPILL_BYTES, 100, {}, 1)
    assert fine.excess is None
    assert replace(fine, spill_bytes=39_000).excess == f"chunk, {ATTENTION}, sm_80: 39000 bytes spilled, the limit is {MAX_SPILL_BYTES}"
    assert "200000 bytes of shared memory, the limit is 166912" in str(replace(fine, shared_memory=200_000).excess)


@pytest.mark.timeout(600)
def test_float32_attention_runs_on_tensor_cores(main_reports: list[dict[str, Any]]) -> None:
    reports = [report for report in main_reports if report["kernel"] == ATTENTION and "float32" in report["case"]]
    assert len(reports) == 4
    assert all(report["tensor_core"] for report in reports)


@pytest.mark.timeout(600)
def test_memory_bound_kernels_move_16_bytes_a_load(main_reports: list[dict[str, Any]]) -> None:
    wanted = ("_rms_norm_kernel", "_gated_activation_kernel", "_apply_penalties_kernel", "_weigh_chunks_kernel", "_top_k_top_p_kernel")
    for report in main_reports:
        if report["kernel"] in wanted:
            assert report["vector_loads"] > 0, (report["case"], report["target"])


@pytest.mark.timeout(600)
def test_large_query_tiles_use_wgmma_on_hopper(main_reports: list[dict[str, Any]]) -> None:
    chunks = [r for r in main_reports if r["kernel"] == ATTENTION and "chunk" in r["case"] and r["target"] == "sm_90"]
    chunks = [report for report in chunks if "float32" not in report["case"]]
    assert chunks
    assert all("wgmma" in report["tensor_core"] for report in chunks)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_model_and_hard_case_compiles() -> None:
    reports = compile_report("--hard-cases")
    check_limits(reports)
    spilling = {(report["case"], report["target"]): report["spill_bytes"] for report in reports if report["spill_bytes"]}
    assert all("float32" in case for case, _ in spilling), spilling
    assert all(spilled <= MAX_SPILL_BYTES for spilled in spilling.values()), spilling
