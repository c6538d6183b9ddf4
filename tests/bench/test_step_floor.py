"""The floor of a step: which of memory and arithmetic bounds it, and by how much."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from aioengine.resolved_config import ModelInfo

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "step_floor.py"
INFO = ModelInfo(
    name="m",
    path="m",
    architecture="LlamaForCausalLM",
    vocab_size=100,
    max_position_embeddings=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    dtype="float32",
    eos_token_ids=frozenset(),
)


@pytest.fixture(scope="module")
def step_floor() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_floor", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["step_floor"] = module
    spec.loader.exec_module(module)
    return module


def test_one_request_is_bound_by_memory_and_many_by_arithmetic(step_floor: ModuleType) -> None:
    machine = step_floor.Machine(read_bytes_s=1e9, float32_flops=1e10, int8_flops=4e10)
    sizes = (1e6, 2e6)  # a megabyte of weights, half a byte each
    kv_values = 2 * 2 * 2 * 8 * (step_floor.PROMPT_LEN + step_floor.NUM_STEPS / 2)
    seconds, bound = step_floor.floor_s(machine, INFO, weights="exact", batch=1, kv_cache_dtype="float16", sizes=sizes)
    assert bound == "memory"
    assert seconds == pytest.approx((1e6 + 2 * kv_values) / 1e9)
    seconds, bound = step_floor.floor_s(machine, INFO, weights="exact", batch=32, kv_cache_dtype="float16", sizes=sizes)
    assert bound == "arithmetic"
    assert seconds >= 2 * 2 * 2e6 * 32 / 4e10  # two digits
    fast, _ = step_floor.floor_s(machine, INFO, weights="fast", batch=32, kv_cache_dtype="float16", sizes=sizes)
    assert fast < seconds
