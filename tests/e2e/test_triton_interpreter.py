"""The whole engine on Triton's interpreter, through the same tables, kernels and calls as on a GPU: the tokens of the CPU."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_layer_windows import save_random_model

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
GREEDY = range(6)
SEEDED = range(6, 8)


def make_requests() -> list[dict[str, Any]]:
    """Greedy ones with shared prefixes, and two equal ones that are sampled with the same seed and every filter."""
    rng = random.Random(7)
    shared = [rng.randrange(2, 258) for _ in range(20)]
    requests = []
    for index in GREEDY:
        prompt = shared[: rng.choice([0, 16, 20])] + [rng.randrange(2, 258) for _ in range(rng.randint(1, 30))]
        params = {"temperature": 0, "max_tokens": rng.randint(4, 14), "min_tokens": 2, "logprobs": 2 if index == 1 else None}
        requests.append({"prompt": prompt, "params": params})
    sampled = {"temperature": 0.9, "seed": 3, "top_k": 50, "top_p": 0.95, "min_p": 0.001, "max_tokens": 6, "ignore_eos": True}
    return requests + [{"prompt": shared, "params": sampled} for _ in SEEDED]


def run_engine(
    folder: Path,
    backend: str,
    *,
    requests: list[dict[str, Any]] | None = None,
    options: dict[str, Any] | None = None,
    **environment: str,
) -> dict[str, Any]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "tui", "benchmarks"))
    command = [sys.executable, str(Path(__file__).parent / "interpreted" / "run_engine.py"), str(folder), backend]
    result = subprocess.run(
        [*command, json.dumps(requests or make_requests()), json.dumps(options or {})],
        env={**inherited, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-8_000:]
    outcome: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return outcome


@pytest.fixture(scope="module")
def interpreted(tiny_model: Path) -> dict[str, Any]:
    return run_engine(tiny_model, "triton", TRITON_INTERPRET="1")


@pytest.mark.timeout(600)
def test_the_tokens_of_the_interpreter_are_those_of_the_cpu(tiny_model: Path, interpreted: dict[str, Any]) -> None:
    expected = run_engine(tiny_model, "torch_paged")
    actual = interpreted
    assert actual["num_preemptions"] > 0, "the pool was meant to force preemption"
    for index in GREEDY:
        for field in ("token_ids", "finish_reason"):
            assert actual["outputs"][index][field] == expected["outputs"][index][field], f"request {index}"
    first, second = (actual["outputs"][index]["token_ids"] for index in SEEDED)
    assert len(first) == 6
    assert first == second, "the same seed gives the same tokens"

    for place, wanted in zip(actual["outputs"][1]["logprobs"], expected["outputs"][1]["logprobs"], strict=True):
        assert [(token, rank) for token, _, rank in place] == [(token, rank) for token, _, rank in wanted]
        assert [value for _, value, _ in place] == pytest.approx([value for _, value, _ in wanted], abs=1e-3)


@pytest.mark.timeout(600)
def test_serving_meets_no_kernel_variant_that_the_warm_up_did_not(interpreted: dict[str, Any]) -> None:
    """Each would be compiled while everybody waits, for a second or more."""
    before, after = interpreted["variants"]
    assert before == after
    assert before["_paged_attention_kernel"] == 2, "one for decodes, one for chunks"
    assert before["_reduce_segments_kernel"] == 2


@pytest.mark.timeout(600)
def test_what_a_step_launches(interpreted: dict[str, Any], tiny_model: Path) -> None:
    """Two launches of attention a layer where decodes and chunks meet, one otherwise; nothing else depends on the mix."""
    num_layers = json.loads((tiny_model / "config.json").read_text())["num_hidden_layers"]
    steps = [step for step in interpreted["steps"] if step["decodes"] + step["chunks"]]
    kinds = {(step["decodes"] > 0, step["chunks"] > 0) for step in steps}
    assert kinds == {(True, True), (True, False), (False, True)}
    for step in steps:
        launches = {name: step["launches"].count(name) for name in step["launches"]}
        assert launches.pop("_paged_attention_kernel") == num_layers * ((step["decodes"] > 0) + (step["chunks"] > 0))
        assert launches.pop("_qk_norm_rope_cache_kernel") == num_layers
        assert launches.pop("_rms_norm_kernel") == 2 * num_layers + 1
        assert launches.pop("_gated_activation_kernel") == num_layers
        assert launches.pop("_batch_inputs_kernel") == 1
        assert launches.pop("_write_rows_kernel", 0) <= 2
        sampling = ("_weigh_chunks_kernel", "_draw_kernel", "_top_k_top_p_kernel", "_token_logprobs_kernel")
        assert all(launches.pop(name, 0) <= 1 for name in sampling)
        assert launches == {}


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(600)
def test_layers_with_windows_of_their_own(tmp_path: Path) -> None:
    """Two KV-cache groups, which share the one cache: prompts of several windows, and a pool that forces preemption."""
    save_random_model("qwen3", tmp_path, layer_types=["sliding_attention", "full_attention"])
    requests = make_requests()[: GREEDY.stop]
    expected = run_engine(tmp_path, "torch_paged", requests=requests, options={"num_kv_cache_blocks": 60})
    options = {"num_kv_cache_blocks": 10, "max_num_batched_tokens": 24}
    actual = run_engine(tmp_path, "triton", requests=requests, options=options, TRITON_INTERPRET="1")
    assert actual["num_preemptions"] > expected["num_preemptions"] == 0
    assert [output["token_ids"] for output in actual["outputs"]] == [output["token_ids"] for output in expected["outputs"]]


@pytest.mark.timeout(600)
def test_an_fp8_cache_through_the_engine(tiny_model: Path) -> None:
    """Keys and values keep 3 bits of mantissa: log-probabilities move by some hundredths, and blocks take a quarter of float32's."""
    rng = random.Random(3)
    params = {"temperature": 0, "max_tokens": 3, "logprobs": 1, "ignore_eos": True}
    requests = [{"prompt": [rng.randrange(2, 258) for _ in range(length)], "params": params} for length in (5, 21)]
    expected = run_engine(tiny_model, "torch_paged", requests=requests)
    actual = run_engine(tiny_model, "triton", requests=requests, options={"kv_cache_dtype": "fp8"}, TRITON_INTERPRET="1")
    differences = []
    for ours, theirs in zip(actual["outputs"], expected["outputs"], strict=True):
        assert len(ours["token_ids"]) == 3
        first, wanted = ours["logprobs"][0], theirs["logprobs"][0]
        differences.append(abs(first[0][1] - wanted[0][1]))
    assert 0 < max(differences) < 0.2
