"""A sweep runs every combination, once, and goes on where it stopped."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioengine.config import EngineConfig
from aioengine.engine.publish_options import PublishOptions
from aioengine.errors import ConfigError
from aioengine_bench import sweep as sweep_module
from aioengine_bench.arrivals import ArrivalProcess
from aioengine_bench.identity import differences, run_identity
from aioengine_bench.serve import run_load, warm_up
from aioengine_bench.settings import Load, ServeSettings, SweepSettings, parse_serve_params
from aioengine_bench.specs import DatasetSpec, SamplingSpec, SaveOptions
from aioengine_bench.sweep import median_result, pareto_front, run_name, saturation_point, saturation_rates, sweep
from tests.bench.conftest import FakeHost
from tests.waiting import until

MakeHost = Callable[..., FakeHost]


def make_settings(folder: Path, **options: Any) -> SweepSettings:
    base = ServeSettings(
        config=EngineConfig(model="fake", seed=0, block_size=4, max_num_seqs=8),
        dataset=DatasetSpec(num_prompts=4, input_len=8, output_len=4),
        save=SaveOptions(folder=str(folder)),
    )
    return SweepSettings(base=base, **{"num_runs": 2, **options})


def run_files(folder: Path) -> list[Path]:
    """The runs, the oldest first."""
    return sorted(folder.glob("sweep_*.json"), key=lambda path: path.stat().st_mtime_ns)


def the_run(folder: Path, params: dict[str, Any], load: Load, run: int) -> Path:
    (path,) = folder.glob(run_name(params, load, run, "*").replace("_.json", "*.json"))
    return path


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
    assert the_run(tmp_path, {"max_num_seqs": 2}, Load(request_rate=100.0), 1).exists()
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
    kept, lost = (the_run(tmp_path, {}, Load(max_concurrency=1), run) for run in (1, 2))
    before = kept.stat().st_mtime_ns
    lost.write_text(json.dumps(json.loads(lost.read_text()) | {"interrupted": True}))
    await sweep(make_settings(tmp_path, max_concurrencies=(1,), resume=True), make_host().host())
    assert kept.stat().st_mtime_ns == before
    assert len(run_files(tmp_path)) == 3
    assert json.loads(run_files(tmp_path)[-1].read_text())["interrupted"] is False


OTHERS: dict[str, dict[str, Any]] = {
    "input_len": {"dataset": DatasetSpec(num_prompts=4, input_len=9, output_len=4)},
    "num_prompts": {"dataset": DatasetSpec(num_prompts=3, input_len=8, output_len=4)},
    "dataset seed": {"dataset": DatasetSpec(num_prompts=4, input_len=8, output_len=4, seed=1)},
    "dataset": {"dataset": DatasetSpec(name="text", num_prompts=4, input_len=8, output_len=4)},
    "ignore_eos": {"dataset": DatasetSpec(num_prompts=4, input_len=8, output_len=4, ignore_eos=False)},
    "dtype": {"config": EngineConfig(model="fake", seed=0, block_size=4, max_num_seqs=8, dtype="float16")},
    "an engine setting": {"config": EngineConfig(model="fake", seed=0, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)},
    "sampling": {"sampling": SamplingSpec(temperature=1.0)},
    "warm-ups": {"num_warmups": 2},
    "percentiles": {"percentiles": (50,)},
    "limits": {"slo_ms": {"ttft": 5.0}},
    "burstiness": {"arrivals": ArrivalProcess(burstiness=0.5)},
    "recording": {"publish": PublishOptions(record="steps.jsonl")},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
async def test_resume_takes_a_result_only_for_what_made_it(other: dict[str, Any], make_host: MakeHost, tmp_path: Path) -> None:
    settings = make_settings(tmp_path, num_runs=1)
    await sweep(settings, make_host().host())
    (first,) = run_files(tmp_path)
    before = first.read_bytes()
    if "publish" in other:
        other = {"publish": PublishOptions(record=tmp_path / "steps.jsonl")}
    changed = dataclasses.replace(settings, base=dataclasses.replace(settings.base, **other), resume=True)
    await sweep(changed, make_host().host())
    assert len(run_files(tmp_path)) == 2, "it was measured"
    assert first.read_bytes() == before, "and the earlier result is still there"


def test_the_identity_of_a_run_has_every_field_of_its_settings(tmp_path: Path) -> None:
    """Whatever is added to the settings later changes the identity, unless it is named here as no cause of any number."""
    base = make_settings(tmp_path).base
    identity = run_identity(base, seed=1)
    left_out = {"save", "publish", "disable_progress"}
    assert {field.name for field in dataclasses.fields(base)} - left_out <= identity["settings"].keys()
    for name, value in dataclasses.asdict(base.config).items():
        assert identity["settings"]["config"][name] == (list(value) if isinstance(value, tuple) else value), name
    assert run_identity(base, seed=1) == identity
    assert differences(identity, run_identity(base, seed=2)) == ["seed"]


def test_a_model_or_dataset_that_changed_on_disk_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    data.write_text('{"prompt": "a"}')
    base = dataclasses.replace(
        make_settings(tmp_path).base,
        config=EngineConfig(model=str(model)),
        dataset=DatasetSpec(name="custom", path=str(data), num_prompts=1),
    )
    first = run_identity(base, seed=1)
    data.write_text('{"prompt": "b"}')
    second = run_identity(base, seed=1)
    assert differences(first, second) == ["dataset"]
    (model / "config.json").write_text('{"a": 1}')
    third = run_identity(base, seed=1)
    assert differences(second, third) == ["model", "tokenizer"]
    monkeypatch.setenv("AIOENGINE_CPU_ISA", "portable")
    assert differences(third, run_identity(base, seed=1)) == ["environment.AIOENGINE_CPU_ISA"]


async def test_a_second_sweep_overwrites_no_run(make_host: MakeHost, tmp_path: Path) -> None:
    settings = make_settings(tmp_path, num_runs=1)
    await sweep(settings, make_host().host())
    (first,) = run_files(tmp_path)
    before = first.read_bytes()
    await sweep(settings, make_host().host())
    assert len(run_files(tmp_path)) == 2
    assert first.read_bytes() == before


async def test_what_would_fail_at_the_end_fails_before_the_first_run(make_host: MakeHost, tmp_path: Path) -> None:
    for metadata in ({"rows": "1"}, {"duration": "5"}, {"made_from": "me"}, {"saturation": "1"}):
        host = make_host()
        settings = make_settings(tmp_path)
        save = dataclasses.replace(settings.base.save, metadata=metadata)
        with pytest.raises(ConfigError, match="own keys"):
            await sweep(dataclasses.replace(settings, base=dataclasses.replace(settings.base, save=save)), host.host())
        assert host.engines == []
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ConfigError, match=r"report\.html: it is a folder"):
        await sweep(make_settings(tmp_path), make_host().host())


async def test_a_rate_and_a_concurrency_hold_together(make_host: MakeHost, tmp_path: Path) -> None:
    base = dataclasses.replace(make_settings(tmp_path).base, max_concurrency=2)
    await sweep(SweepSettings(base=base, request_rates=(50.0,), num_runs=1), make_host().host())
    (result,) = [json.loads(path.read_text()) for path in run_files(tmp_path)]
    assert (result["request_rate"], result["max_concurrency"]) == (50.0, 2)
    assert result["max_concurrent_requests"] <= 2


async def test_warm_ups_come_before_each_combination(make_host: MakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    async def note_warm_up(*args: Any) -> None:
        order.append("warm-up")
        await warm_up(*args)

    async def note_load(*args: Any) -> Any:
        order.append("run")
        return await run_load(*args)

    monkeypatch.setattr(sweep_module, "warm_up", note_warm_up)
    monkeypatch.setattr(sweep_module, "run_load", note_load)
    await sweep(make_settings(tmp_path, max_concurrencies=(1, 2), num_runs=2), make_host().host())
    assert order == ["warm-up", "run", "run"] * 2


async def test_the_page_of_a_sweep_keeps_settings_apart(make_host: MakeHost, tmp_path: Path) -> None:
    params = parse_serve_params('[{"max_num_seqs": 2}, {"max_num_seqs": 4}]')
    await sweep(make_settings(tmp_path, max_concurrencies=(1, 2), serve_params=params, num_runs=1), make_host().host())
    page = (tmp_path / "report.html").read_text()
    for setting in ("max_num_seqs=2", "max_num_seqs=4"):
        assert page.count(f'<td class="text">{setting}</td>') == 2, "a row says its settings"
        assert f">{setting}</text>" in page, "and so does a line"
    chart = page.split("Throughput and E2EL p50</text>")[1].split("</svg>")[0]
    assert chart.count("<path") == 2, "one line a setting"


def test_the_saturation_point_is_the_highest_rate_that_was_kept_up_with() -> None:
    def run(rate: float | str, reached: float) -> dict[str, Any]:
        return {"request_rate": rate, "request_throughput": reached, "output_throughput": 10 * reached}

    medians = [run("inf", 9.0), run(2.0, 2.0), run(6.0, 5.6), run(10.0, 8.0)]
    point = saturation_point(medians)
    assert point is not None
    assert point["request_rate"] == 6.0
    assert saturation_point([run(5.0, 1.0)]) is None


async def test_saturation_chooses_its_rates(make_host: MakeHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await sweep(make_settings(tmp_path, find_saturation=True, num_runs=1), make_host(forward_s=0.001).host())
    loads = [row["load"] for row in json.loads((tmp_path / "summary.json").read_text())["rows"]]
    assert loads[:2] == ["concurrency=1", "all-at-once"]
    assert len([load for load in loads if load.startswith("rate=")]) == 6
    assert json.loads((tmp_path / "summary.json").read_text())["saturation"].keys() == {"default"}
    assert capsys.readouterr().out.count("Saturation (default):") == 1


async def test_a_dry_run_starts_nothing(make_host: MakeHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = make_host()
    await sweep(make_settings(tmp_path, request_rates=(1.0, 2.0), dry_run=True), host.host())
    assert host.engines == []
    assert capsys.readouterr().out.splitlines() == ["default; rate=1; 2 runs", "default; rate=2; 2 runs"]


async def test_an_interrupted_sweep_keeps_its_files(make_host: MakeHost, tmp_path: Path) -> None:
    task = asyncio.create_task(sweep(make_settings(tmp_path, request_rates=(200.0, 0.5)), make_host().host()))
    await until(lambda: any(tmp_path.glob(run_name({}, Load(request_rate=200.0), 1, "*").replace("_.json", "*.json"))))
    await asyncio.sleep(0.5)
    task.cancel()
    assert await task is True
    assert json.loads((tmp_path / "summary.json").read_text())["interrupted"] is True
    assert json.loads(the_run(tmp_path, {}, Load(request_rate=0.5), 1).read_text())["interrupted"] is True
    assert "(interrupted)" in (tmp_path / "report.html").read_text()


def test_saturation_rates_go_from_sequential_to_beyond_capacity() -> None:
    rates = saturation_rates(1.0, 10.0)
    assert rates[0] == 1.0
    assert rates[-1] == pytest.approx(11.0)
    assert rates == sorted(rates)


def test_pareto_front() -> None:
    assert pareto_front([(1.0, 10.0), (2.0, 8.0), (1.5, 7.0), (3.0, 1.0), (3.0, 0.5)]) == [(1.0, 10.0), (2.0, 8.0), (3.0, 1.0)]
    assert pareto_front([]) == []


def test_the_median_of_the_repeats() -> None:
    results = [{"output_throughput": value} for value in (3.0, None, 2.0)]
    assert median_result(results)["output_throughput"] == 2.0
    assert median_result(results[::2])["output_throughput"] == 2.5, "of two neither the best nor the worst"
    interrupted = [{"output_throughput": 9.0, "interrupted": True}, {"output_throughput": 1.0, "interrupted": False}]
    assert median_result(interrupted)["output_throughput"] == 1.0


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
