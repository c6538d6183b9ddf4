"""A sweep runs every combination, once, and goes on where it stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine_bench.datasets import DatasetSpec
from aioengine_bench.results import SaveOptions
from aioengine_bench.serve import ServeSettings
from aioengine_bench.sweep import (
    Load,
    SweepSettings,
    median_result,
    pareto_front,
    parse_serve_params,
    run_name,
    saturation_rates,
    sweep,
)
from tests.bench.conftest import FakeHost

MakeHost = Callable[..., FakeHost]


def make_settings(folder: Path, **options: Any) -> SweepSettings:
    base = ServeSettings(
        config=EngineConfig(model="fake", seed=0, block_size=4, max_num_seqs=8),
        dataset=DatasetSpec(num_prompts=4, input_len=8, output_len=4),
        save=SaveOptions(folder=str(folder)),
    )
    return SweepSettings(base=base, **{"num_runs": 2, **options})


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_every_combination_runs(make_host: MakeHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = make_host()
    params = parse_serve_params('[{"max_num_seqs": 2}, {"max_num_seqs": 4}]')
    settings = make_settings(tmp_path, request_rates=(100.0,), max_concurrencies=(1, 2), serve_params=params)
    assert await sweep(settings, host.host()) is False
    assert len(host.engines) == 2, "one engine a combination of settings"
    names = names_in(tmp_path)
    assert len([name for name in names if name.startswith("sweep_")]) == 2 * 3 * 2
    assert run_name({"max_num_seqs": 2}, Load(request_rate=100.0), 1) in names
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(row["settings"], row["load"]) for row in summary["rows"]][:3] == [
        ("max_num_seqs=2", "rate=100"),
        ("max_num_seqs=2", "concurrency=1"),
        ("max_num_seqs=2", "concurrency=2"),
    ]
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert "tok/s/user" in capsys.readouterr().out


async def test_nothing_of_an_earlier_run_is_in_the_prefix_cache(make_host: MakeHost, tmp_path: Path) -> None:
    await sweep(make_settings(tmp_path, num_runs=3), make_host().host())
    results = [json.loads((tmp_path / name).read_text()) for name in names_in(tmp_path) if name.startswith("sweep_")]
    assert [result["total_cached_tokens"] for result in results] == [0, 0, 0]


async def test_resume_leaves_out_what_is_there(make_host: MakeHost, tmp_path: Path) -> None:
    await sweep(make_settings(tmp_path, max_concurrencies=(1,)), make_host().host())
    kept, lost = (tmp_path / run_name({}, Load(max_concurrency=1), run) for run in (1, 2))
    before = kept.stat().st_mtime_ns
    lost.write_text(json.dumps({"interrupted": True}))
    await sweep(make_settings(tmp_path, max_concurrencies=(1,), resume=True), make_host().host())
    assert kept.stat().st_mtime_ns == before
    assert json.loads(lost.read_text())["interrupted"] is False


async def test_saturation_chooses_its_rates(make_host: MakeHost, tmp_path: Path) -> None:
    await sweep(make_settings(tmp_path, find_saturation=True, num_runs=1), make_host(forward_s=0.001).host())
    loads = [row["load"] for row in json.loads((tmp_path / "summary.json").read_text())["rows"]]
    assert loads[:2] == ["concurrency=1", "all-at-once"]
    assert len([load for load in loads if load.startswith("rate=")]) == 6


async def test_a_dry_run_starts_nothing(make_host: MakeHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = make_host()
    await sweep(make_settings(tmp_path, request_rates=(1.0, 2.0), dry_run=True), host.host())
    assert host.engines == []
    assert capsys.readouterr().out.splitlines() == ["default; rate=1; 2 runs", "default; rate=2; 2 runs"]


async def test_an_interrupted_sweep_keeps_its_files(make_host: MakeHost, tmp_path: Path) -> None:
    task = asyncio.create_task(sweep(make_settings(tmp_path, request_rates=(200.0, 0.5)), make_host().host()))
    await asyncio.sleep(1.0)
    task.cancel()
    assert await task is True
    assert json.loads((tmp_path / "summary.json").read_text())["interrupted"] is True
    assert json.loads((tmp_path / run_name({}, Load(request_rate=0.5), 1)).read_text())["interrupted"] is True


def test_saturation_rates_go_from_sequential_to_beyond_capacity() -> None:
    rates = saturation_rates(1.0, 10.0)
    assert rates[0] == 1.0
    assert rates[-1] == pytest.approx(11.0)
    assert rates == sorted(rates)


def test_pareto_front() -> None:
    assert pareto_front([(1.0, 10.0), (2.0, 8.0), (1.5, 7.0), (3.0, 1.0), (3.0, 0.5)]) == [(1.0, 10.0), (2.0, 8.0), (3.0, 1.0)]
    assert pareto_front([]) == []


def test_the_median_result_is_one_of_them() -> None:
    results = [{"output_throughput": value} for value in (3.0, None, 2.0)]
    assert median_result(results)["output_throughput"] == 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[1]", "list of objects"), ('[{"max_seqs": 1}]', "max_seqs"), ("/nowhere.json", "cannot read")],
)
def test_bad_serve_params(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_serve_params(text)


def test_contradictions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chooses the loads itself"):
        make_settings(tmp_path, find_saturation=True, request_rates=(1.0,))
    with pytest.raises(ConfigError, match="num_runs must be at least 1"):
        make_settings(tmp_path, num_runs=0)
