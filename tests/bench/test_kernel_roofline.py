"""Products as shares of what was measured first."""

from __future__ import annotations

import json
from functools import partial

import pytest

from aioengine.errors import ConfigError
from aioengine_bench.kernel_roofline import format_roofline, roofline_rows
from aioengine_bench.kernels import kernels
from aioengine_bench.settings import KernelSettings
from aioengine_bench.specs import SaveOptions
from aioengine_kernels.cpu import status, supported_isas
from aioengine_kernels.cpu.peak import measure_peak

pytestmark = pytest.mark.skipif(status() is not None, reason=str(status()))


def test_wider_vectors_multiply_more() -> None:
    peaks = [measure_peak(isa=isa, budget_s=0.0, memory_bytes=1 << 20) for isa in supported_isas()]
    assert all(peak.float32_ops_s > 1e8 and peak.read_bytes_s > 1e8 for peak in peaks)
    by_isa = {peak.isa: peak for peak in peaks}
    assert by_isa["portable"].int8_ops_s is None
    for peak in peaks[1:]:
        assert peak.int8_ops_s is not None
        assert peak.int8_ops_s > 1.2 * peak.float32_ops_s  # four times as many, where nothing disturbs


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioengine_kernels.cpu.peak.measure_peak", partial(measure_peak, budget_s=0.0, memory_bytes=1 << 20))
    monkeypatch.setattr("aioengine_bench.kernel_roofline.COPIES_BYTES", 1)


@pytest.mark.usefixtures("little_memory")
def test_rows_are_consistent() -> None:
    rows = list(roofline_rows(num_tokens=[1, 7], threads=[1], min_time=0.0))
    peaks = {row["isa"]: row for row in rows if row["op"] == "peak"}
    assert list(peaks) == list(supported_isas()[1:] or supported_isas())
    products = [row for row in rows if row["op"] != "peak"]
    assert {row["isa"] for row in products} == set(supported_isas()) - {"portable"}
    for row in products:
        peak = peaks[row["isa"]]
        assert row["gops"] == pytest.approx(2e-3 * row["num_tokens"] * row["rows"] * row["columns"] / row["time_us"])
        assert row["of_int8_peak"] == pytest.approx(row["gops"] / peak["int8_gops"])
        assert row["of_read_peak"] == pytest.approx(row["gb_per_s"] / peak["read_gb_per_s"])
        least = max(row["of_int8_peak"] * (1 if row["mode"] == "fast" else 2), row["of_read_peak"])
        assert row["of_roofline"] == pytest.approx(least)
    text = format_roofline(rows)
    assert text.count("at most:") == len(peaks)
    assert "down" in text


@pytest.mark.usefixtures("little_memory")
def test_the_command(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    kernels(KernelSettings(roofline=True, num_tokens=[2], threads=1, min_time=0.001, save=SaveOptions(output_json="-")))
    result = json.loads(capsysbinary.readouterr().out)
    assert {row["op"] for row in result["rows"]} >= {"peak", "qkv"} if len(supported_isas()) > 1 else {"peak"}


@pytest.mark.parametrize("roofline", [False, True])
def test_a_wrong_instruction_set_is_named_in_one_line(roofline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOENGINE_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match="AIOENGINE_CPU_ISA is wrong: instruction set 'sse9' is not available here"):
        kernels(KernelSettings(ops=["silu_mul"], num_tokens=[1], device="cpu", roofline=roofline))
