"""No figure without a right result."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from aioengine.errors import ConfigError
from aioengine_bench.kernel_case import KernelCase, Variant
from aioengine_bench.kernel_cases import CaseFactory, all_cases
from aioengine_bench.kernels import Roofline, format_rows, kernels, measure_case, relative_error
from aioengine_bench.settings import KernelSettings
from aioengine_bench.specs import SaveOptions
from aioengine_kernels.compile_report import ModelShape

CPU = torch.device("cpu")
ROOFLINE = Roofline(bytes_per_s=1e10, flops_per_s=1e11)
SMALL = CaseFactory(CPU, torch.float32, ModelShape(4, 2, 16, 64, 96, 211))


@pytest.fixture
def case() -> KernelCase:
    return SMALL.rms_norm(3)


@pytest.mark.parametrize("name", [case.op for case in SMALL.all(3)])
def test_every_reference_agrees_with_its_oracle(name: str) -> None:
    case = next(case for case in SMALL.all(3) if case.op == name)
    assert relative_error(case.reference(case.inputs()), case.oracle()) < 1e-5
    assert case.num_bytes > 0


def test_native_variants_are_right() -> None:
    for case in all_cases(CPU, 2):
        for name, variant in case.variants.items():
            error = relative_error(variant.run(case.inputs()), case.oracle())
            assert error <= variant.tolerance, f"{case.op}, {name}: {error}"


def test_a_wrong_variant_gets_no_figure(case: KernelCase) -> None:
    wrong = Variant(lambda i: tuple(x * 1.01 for x in case.reference(i)), 1e-5)
    broken = Variant(lambda i: tuple(x * float("nan") for x in case.reference(i)), 1e-5)
    right = Variant(case.reference, 1e-5)
    rows = measure_case(replace(case, variants={"wrong": wrong, "nan": broken, "right": right}), ROOFLINE, min_time=0.001, device=CPU)
    assert [(row["variant"], row["passed"], row["time_us"] is None, row["speedup"] is None) for row in rows] == [
        ("reference", True, False, False),
        ("wrong", False, True, True),
        ("nan", False, True, True),
        ("right", True, False, False),
    ]
    lines = format_rows(rows).splitlines()
    assert "WRONG" in lines[3]
    assert "x" not in lines[3].split("WRONG")[1]


def test_the_roofline_is_the_longer_of_two_times() -> None:
    assert ROOFLINE.least_seconds(1e10, 0) == pytest.approx(1.0)
    assert ROOFLINE.least_seconds(1e9, 2e11) == pytest.approx(2.0)


def test_the_command(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    kernels(KernelSettings(ops=["silu_mul"], num_tokens=[2], min_time=0.001, device="cpu", save=SaveOptions(output_json="-")))
    result = json.loads(capsysbinary.readouterr().out)
    assert {row["op"] for row in result["rows"]} == {"silu_mul"}
    assert result["bandwidth_gb_per_s"] > 0


def test_an_unknown_op_is_named() -> None:
    with pytest.raises(ConfigError, match="no op nothing; there are: linear"):
        kernels(KernelSettings(ops=["nothing"], num_tokens=[1], device="cpu"))
