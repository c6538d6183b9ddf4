"""The GPU check itself, where there is no GPU: it says so, and a rehearsal in Triton's interpreter runs to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gpu_checks.engine import TINY, RandomEngine, Run, compare_tokens, logit_gap
from gpu_checks.serving import ServingSizes, check_long_runs, check_serving

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """From another folder and without what pytest put on the path: a plain checkout."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    result = run_script(tmp_path)
    assert result.returncode == 2
    assert "finds no CUDA device; nothing was checked" in result.stdout
    assert not list(tmp_path.iterdir())


def rehearse(folder: Path, *arguments: str) -> dict[str, Any]:
    result = run_script(folder, "--rehearse", *arguments)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "every check passed" in result.stdout.splitlines()[-2]
    report: dict[str, Any] = json.loads((folder / "gpu_check.json").read_text())
    assert report["passed"]
    assert "rehearsal" in report["environment"]["device"]
    return report


@pytest.mark.timeout(600)
def test_a_rehearsal_of_all_but_the_features(tmp_path: Path) -> None:
    report = rehearse(tmp_path, "--parts", "kernels,tokens,bandwidth,speed")
    assert {"batch_inputs", "write_rows", "draw_tokens", "sampling kernels beside a row of one NaN"} <= {
        check["name"] for check in report["kernels"]
    }
    assert len(report["tokens"]) == 3
    assert all(check["num_equal"] == check["num_tokens"] for check in report["tokens"])
    assert set(report["models"]["tiny"]["decode"]["2"]) == {"step_ms", "host_ms", "no_overlap_step_ms", "eager_step_ms"}
    assert set(report["models"]["tiny"]["decode"]["2"]["host_ms"]) == {"schedule", "update", "execute", "sample"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_rehearsal_of_the_features_in_the_interpreter(tmp_path: Path) -> None:
    report = rehearse(tmp_path, "--parts", "serving")
    assert [check["name"] for check in report["serving"]] == FEATURES
    assert report["serving"][-1]["message"].endswith("new: none")


# ------------------------------------------------------------------ the checks of serving, on engines that need no GPU
FEATURES = [
    "log-probabilities as on the CPU",
    "sampled tokens are within their filters",
    "seeded tokens do not depend on batch mates",
    "penalties, biases and bad words as on the CPU",
    "a grammar's masks beside free requests",
    "a NaN row fails alone",
    "a long context among prompts and short decodes",
    "no call waits for the device",
    "nothing is compiled while serving",
]
SIZES = ServingSizes(long_context=300, num_companions=4, num_soak_requests=20, soak_steps=60, sync_steps=10, max_tokens=6)


@pytest.fixture
def engines() -> Iterator[tuple[RandomEngine, RandomEngine]]:
    """The one to check, and the one that is right: here both run on the CPU."""
    options: dict[str, Any] = {
        "max_num_seqs": 6,
        "max_model_len": 320,
        "num_kv_cache_blocks": 60,
        "num_threads": 1,
        "same_everywhere": True,
    }
    pair = [RandomEngine(TINY, device="cpu", dtype="float32", attention_backend="torch_paged", **options) for _ in range(2)]
    for engine in pair:
        engine.start()
    yield pair[0], pair[1]
    for engine in pair:
        engine.stop()


def failed_checks(engines: tuple[RandomEngine, RandomEngine]) -> list[str]:
    engine, cpu = engines
    checks = list(check_serving(engine, cpu, gap=logit_gap(cpu), sizes=SIZES, limit=5e-3))
    assert [check.name for check in checks] == FEATURES
    return [check.name for check in checks if not check.passed]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the engines of this process would be interpreted")
def test_a_right_engine_passes_every_check_of_serving(engines: tuple[RandomEngine, RandomEngine]) -> None:
    assert failed_checks(engines) == []


def test_an_engine_that_samples_wrongly_is_found(engines: tuple[RandomEngine, RandomEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The filters keep everything, penalties do nothing, and a row of NaN gives tokens like any other."""
    worker = engines[0].call_model(lambda worker: worker)
    pipeline = worker.runner._pipeline
    sample = pipeline.sample

    def broken(logits: torch.Tensor, batch: Any, **options: Any) -> Any:
        return sample(logits.nan_to_num(0.0).mul(0.1), batch, **options)

    monkeypatch.setattr(pipeline, "sample", broken)
    wrong = failed_checks(engines)
    assert {"log-probabilities as on the CPU", "a NaN row fails alone"} <= set(wrong)
    assert "a grammar's masks beside free requests" not in wrong


def test_long_runs_are_compared_over_preemptions_and_aborts() -> None:
    options: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_model_len": 48,
        "num_kv_cache_blocks": 4,
        "max_num_batched_tokens": 64,
        "num_threads": 1,
    }
    engine = RandomEngine(TINY, device="cpu", dtype="float32", attention_backend="torch_paged", same_everywhere=True, **options)
    engine.start()
    checks = list(check_long_runs(engine, gap=logit_gap(engine), sizes=SIZES, limit=1e-3))
    engine.stop()
    assert len(checks) == 2
    for check in checks:
        assert check.passed, check
        assert check.num_equal == check.num_tokens > 100
    assert "preemptions, 4 aborts" in checks[0].name


def test_tokens_may_differ_at_near_ties_only() -> None:
    def gap(history: list[int], token: int) -> float:
        assert history == [9, 1, 2]
        return {5: 1e-4, 6: 1.0}[token]

    def compare(tokens: list[int]) -> tuple[bool, int]:
        check = compare_tokens("x", Run([[1, 2, 3, 4]]), Run([tokens]), prompts=[[9]], gap=gap, limit=1e-3)
        return check.passed, check.num_equal

    assert compare([1, 2, 3, 4]) == (True, 4)
    assert compare([1, 2, 5, 0]) == (True, 2)  # a tie; after it the histories differ, and so may the tokens
    assert compare([1, 2, 6, 4]) == (False, 2)
