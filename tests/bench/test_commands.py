"""The benchmarks as commands, on an engine without a model: what they print, save, and do when they are interrupted."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioengine.cli import main
from aioengine.config import EngineConfig
from aioengine.errors import AioEngineError, ConfigError
from aioengine.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from aioengine_bench.arrivals import ArrivalProcess
from aioengine_bench.client import RequestFailed, check_complete
from aioengine_bench.latency import latency
from aioengine_bench.load import LoadResult
from aioengine_bench.results import read_results
from aioengine_bench.serve import default_file_name, serve
from aioengine_bench.settings import LatencySettings, ServeSettings, ThroughputSettings, parse_goodput, parse_metrics, parse_percentiles
from aioengine_bench.specs import DatasetSpec, SaveOptions
from aioengine_bench.throughput import make_result, throughput
from tests.bench.conftest import FakeHost

ROOT = Path(__file__).resolve().parents[2]
CONFIG = EngineConfig(model="fake", seed=0, max_num_seqs=8, block_size=4)
DATASET = DatasetSpec(num_prompts=5, input_len=8, output_len=4)
MakeHost = Callable[..., FakeHost]

# What `vllm bench serve` writes, and what it adds with --save-detailed: name -> type of the value.
NUMBER = (int, float)
SERVE_SCHEMA: dict[str, type | tuple[type, ...]] = {
    "date": str,
    "endpoint_type": str,
    "backend": str,
    "label": (str, type(None)),
    "model_id": str,
    "tokenizer_id": str,
    "num_prompts": int,
    "request_rate": (str, int, float),
    "burstiness": (str, int, float),
    "max_concurrency": (int, type(None)),
    "ramp_up_strategy": (str, type(None)),
    "ramp_up_start_rps": (*NUMBER, type(None)),
    "ramp_up_end_rps": (*NUMBER, type(None)),
    "duration": NUMBER,
    "completed": int,
    "failed": int,
    "total_input_tokens": int,
    "total_output_tokens": int,
    "request_throughput": NUMBER,
    "request_goodput": (*NUMBER, type(None)),
    "output_throughput": NUMBER,
    "total_token_throughput": NUMBER,
    "max_output_tokens_per_s": NUMBER,
    "max_concurrent_requests": int,
    "rps_change_events": list,
    **{f"{name}_{metric}_ms": NUMBER for name in ("mean", "median", "std", "p99") for metric in ("ttft", "tpot", "itl", "e2el")},
}
DETAILED_SCHEMA = dict.fromkeys(("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"), list)
THROUGHPUT_SCHEMA = {
    "elapsed_time": NUMBER,
    "num_requests": int,
    "total_num_tokens": int,
    "requests_per_second": NUMBER,
    "tokens_per_second": NUMBER,
}
LATENCY_SCHEMA = {"avg_latency": NUMBER, "std_latency": NUMBER, "latencies": list, "percentiles": dict}


def check_schema(result: dict[str, Any], schema: dict[str, Any]) -> None:
    missing = schema.keys() - result.keys()
    assert not missing, f"missing keys: {sorted(missing)}"
    for key, kind in schema.items():
        assert isinstance(result[key], kind), f"{key} is {result[key]!r}"
        assert not isinstance(result[key], bool), key


def load_strictly(content: bytes | str) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    value: dict[str, Any] = json.loads(content, parse_constant=refuse)
    return value


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


# ---------------------------------------------------------------------------------------------------- serve
async def test_serve_writes_vllms_keys(make_host: MakeHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save = SaveOptions(save=True, detailed=True, folder=str(tmp_path), metadata={"gpu": "none"}, label="mine")
    settings = ServeSettings(
        config=CONFIG,
        dataset=DATASET,
        save=save,
        arrivals=ArrivalProcess(request_rate=100.0),
        max_concurrency=3,
        slo_ms={"ttft": 10_000.0},
    )
    await serve(settings, make_host().host())
    (path,) = files_in(tmp_path)
    assert path.name.startswith("mine-100qps-concurrency3-fake-")
    result = load_strictly(path.read_bytes())
    check_schema(result, SERVE_SCHEMA | DETAILED_SCHEMA)
    assert (result["completed"], result["failed"], result["aborted"], result["interrupted"]) == (5, 0, 0, False)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (40, 20)
    assert result["output_lens"] == [4] * 5
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["max_output_tokens_per_s"] >= result["output_throughput"]
    assert result["gpu"] == "none"
    assert result["engine"]["async_scheduling"] is True
    text = capsys.readouterr().out
    assert "Serving Benchmark Result" in text
    assert "P99 TTFT (ms):" in text
    assert "waiting for --max-concurrency is not in them" in text


async def test_an_infinite_rate_is_written_as_text(make_host: MakeHost, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    settings = ServeSettings(config=CONFIG, dataset=DATASET, save=SaveOptions(output_json="-"))
    await serve(settings, make_host().host())
    captured = capsysbinary.readouterr()
    result = load_strictly(captured.out)
    assert result["request_rate"] == "inf"
    assert b"Serving Benchmark Result" in captured.err, "stdout is JSON alone, the text goes to stderr"
    assert b"serving:" not in captured.err, "no progress bar where there is no terminal"


async def test_warm_ups_are_not_counted_and_cache_nothing_of_the_run(
    make_host: MakeHost, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    host = make_host()
    settings = ServeSettings(config=CONFIG, dataset=DATASET, save=SaveOptions(output_json="-"), num_warmups=3)
    await serve(settings, host.host())
    result = load_strictly(capsysbinary.readouterr().out)
    assert result["completed"] == 5
    assert result["total_cached_tokens"] == 0


async def test_requests_that_cannot_be_served_are_counted_and_shown(
    make_host: MakeHost, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "fits", "output_tokens": 3}\n' + json.dumps({"prompt": "x" * 5000, "output_tokens": 3}))
    dataset = DatasetSpec(name="custom", path=str(path), num_prompts=4)
    await serve(ServeSettings(config=CONFIG, dataset=dataset, save=SaveOptions(output_json="-", detailed=True)), make_host().host())
    result = load_strictly(capsysbinary.readouterr().out)
    assert (result["completed"], result["failed"]) == (2, 2)
    assert "InvalidRequestError" in result["errors"][1]


async def test_a_run_without_any_success_is_a_failure_with_its_reasons(
    make_host: MakeHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "custom.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 5000, "output_tokens": 3}))
    dataset = DatasetSpec(name="custom", path=str(path), num_prompts=4)
    save = SaveOptions(save=True, folder=str(tmp_path / "out"))
    for run in (
        serve(ServeSettings(config=CONFIG, dataset=dataset, save=save, num_warmups=0), make_host().host()),
        throughput(ThroughputSettings(config=CONFIG, dataset=dataset, save=save, num_warmups=0), make_host().host()),
    ):
        with pytest.raises(AioEngineError, match=r"none of 4 requests was completed: 4 x InvalidRequestError: .*5000|5001"):
            await run
    for result in map(read_results, files_in(tmp_path / "out")):
        assert list(result[0]["failure_reasons"].values()) == [4], "the result is saved all the same"
    capsys.readouterr()


async def test_an_answer_that_would_be_cut_off_is_refused(make_host: MakeHost) -> None:
    config = dataclasses.replace(CONFIG, max_model_len=64)
    dataset = DatasetSpec(num_prompts=2, input_len=60, output_len=10)
    with pytest.raises(ConfigError, match="asks for 10 tokens after 60, but max_model_len is 64: shorten it, or allow 70"):
        await serve(ServeSettings(config=config, dataset=dataset), make_host().host())
    with pytest.raises(ConfigError, match="max_model_len is 64"):
        await throughput(ThroughputSettings(config=config, dataset=dataset), make_host().host())
    with pytest.raises(ConfigError, match="max_model_len is 64"):
        await latency(LatencySettings(config=config, input_len=60, output_len=10), make_host().host())


def test_an_answer_that_was_cut_off_is_not_completed() -> None:
    def output(finish_reason: FinishReason, num_tokens: int, error: str | None = None) -> RequestOutput:
        completion = CompletionOutput(0, "", [1] * num_tokens, finish_reason=finish_reason, error=error)
        return RequestOutput("a", [1], [completion], RequestMetrics(0.0))

    check_complete(output("length", 8), 8, ignore_eos=True)
    check_complete(output("stop", 3), 8, ignore_eos=False)
    for cut, ignore_eos in ((output("length", 7), False), (output("stop", 3), True)):
        with pytest.raises(RequestFailed, match=r"cut off: [37] of 8 tokens"):
            check_complete(cut, 8, ignore_eos=ignore_eos)
    with pytest.raises(RequestFailed, match="logits"):
        check_complete(output("error", 8, "the logits are not numbers"), 8, ignore_eos=True)


@pytest.mark.alone
async def test_num_prompts_is_the_number_that_was_sent(
    make_host: MakeHost, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f'{{"timestamp": {ms}, "input_length": 3, "output_length": 2}}\n' for ms in (90, 10, 50)))
    dataset = DatasetSpec(name="timed_trace", path=str(path))
    await serve(ServeSettings(config=CONFIG, dataset=dataset, save=SaveOptions(output_json="-", detailed=True)), make_host().host())
    result = load_strictly(capsysbinary.readouterr().out)
    assert result["num_prompts"] == 3
    assert result["start_times"] == sorted(result["start_times"])
    assert result["start_times"][2] == pytest.approx(0.08, abs=0.06), "sorted, and from the earliest on"
    with pytest.raises(ConfigError, match="brings its own arrival times: use"):
        await throughput(ThroughputSettings(config=CONFIG, dataset=dataset), make_host().host())


async def test_throughput_interrupted_before_anything_finished_says_so(
    make_host: MakeHost, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    dataset = DatasetSpec(num_prompts=5, input_len=8, output_len=400)
    settings = ThroughputSettings(config=CONFIG, dataset=dataset, save=SaveOptions(output_json="-"), num_warmups=0)
    task = asyncio.create_task(throughput(settings, make_host(forward_s=0.01).host()))
    await asyncio.sleep(0.6)
    task.cancel()
    assert await task is True
    captured = capsysbinary.readouterr()
    result = load_strictly(captured.out)
    assert (result["interrupted"], result["num_requests"]) == (True, 0)
    assert result["elapsed_time"] > 0.2, "the time that passed, not that of nothing"
    assert b"Interrupted in run 1 of 1: 0 of 5 were completed." in captured.err


@pytest.mark.alone
async def test_a_trace_brings_its_own_times(make_host: MakeHost, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    dataset = DatasetSpec(name="burst", num_prompts=4, burst_size=2, burst_interval=0.2, input_len=4, output_len=2)
    settings = ServeSettings(config=CONFIG, dataset=dataset, save=SaveOptions(output_json="-", detailed=True))
    await serve(settings, make_host().host())
    starts = load_strictly(capsysbinary.readouterr().out)["start_times"]
    assert starts[2] - starts[0] == pytest.approx(0.2, abs=0.08)
    with pytest.raises(ConfigError, match="brings its own arrival times"):
        await serve(ServeSettings(config=CONFIG, dataset=dataset, arrivals=ArrivalProcess(request_rate=1.0)), make_host().host())


async def test_an_interrupted_serve_saves_a_valid_partial_result(make_host: MakeHost, tmp_path: Path) -> None:
    dataset = DatasetSpec(num_prompts=50, input_len=8, output_len=4)
    save = SaveOptions(save=True, detailed=True, folder=str(tmp_path))
    settings = ServeSettings(config=CONFIG, dataset=dataset, arrivals=ArrivalProcess(request_rate=20.0), save=save)
    task = asyncio.create_task(serve(settings, make_host().host()))
    await asyncio.sleep(0.8)
    task.cancel()
    assert await task is True
    (path,) = files_in(tmp_path)
    result = load_strictly(path.read_bytes())
    check_schema(result, SERVE_SCHEMA | DETAILED_SCHEMA)
    assert result["interrupted"] is True
    assert 0 < result["completed"] < 50


# ---------------------------------------------------------------------------------------------------- throughput, latency
@pytest.mark.parametrize("stream", [False, True])
async def test_throughput(stream: bool, make_host: MakeHost, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    settings = ThroughputSettings(config=CONFIG, dataset=DATASET, save=SaveOptions(output_json="-"), num_runs=3, stream=stream)
    await throughput(settings, make_host().host())
    captured = capsysbinary.readouterr()
    result = load_strictly(captured.out)
    check_schema(result, THROUGHPUT_SCHEMA)
    assert (result["num_requests"], result["total_num_tokens"], result["total_output_tokens"]) == (5, 60, 20)
    assert result["tokens_per_second"] == pytest.approx(60 / result["elapsed_time"])
    assert [run["total_cached_tokens"] for run in result["runs"]] == [0, 0, 0], "the prefix cache is reset before each run"
    assert result["elapsed_time"] == sorted(run["elapsed_time"] for run in result["runs"])[1]
    assert b"Output tok/s of 3 runs" in captured.err


def test_the_median_prefers_complete_runs() -> None:
    settings = ThroughputSettings(config=CONFIG, dataset=DATASET)
    runs = [LoadResult([], 0.0, time, interrupted=time < 1.0) for time in (5.0, 0.5, 3.0, 4.0)]
    assert make_result(settings, runs, date="", engine={})["elapsed_time"] == 4.0
    assert make_result(settings, runs[:3], date="", engine={})["elapsed_time"] == 4.0, "of two the mean"
    assert make_result(settings, runs[1:2], date="", engine={})["elapsed_time"] == 0.5


async def test_latency(make_host: MakeHost, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    host = make_host()
    settings = LatencySettings(
        config=CONFIG, input_len=12, output_len=3, batch_size=2, num_iters=4, num_iters_warmup=2, save=SaveOptions(output_json="-")
    )
    await latency(settings, host.host())
    result = load_strictly(capsysbinary.readouterr().out)
    check_schema(result, LATENCY_SCHEMA)
    assert len(result["latencies"]) == 4
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)


async def test_an_interrupted_latency_keeps_what_was_measured(make_host: MakeHost, tmp_path: Path) -> None:
    settings = LatencySettings(
        config=CONFIG, output_len=4, num_iters=1000, num_iters_warmup=0, save=SaveOptions(save=True, folder=str(tmp_path))
    )
    task = asyncio.create_task(latency(settings, make_host(forward_s=0.002).host()))
    await asyncio.sleep(0.5)
    task.cancel()
    assert await task is True
    (path,) = files_in(tmp_path)
    result = load_strictly(path.read_bytes())
    check_schema(result, LATENCY_SCHEMA)
    assert 0 < len(result["latencies"]) < 1000


# ---------------------------------------------------------------------------------------------------- arguments
def test_goodput_is_checked() -> None:
    assert parse_goodput(["ttft:200", "e2el:1500.5"]) == {"ttft": 200.0, "e2el": 1500.5}
    for wrong in ("itl:5", "ttft", "ttft:-1", "ttft:nan", "ttft:x"):
        with pytest.raises(ConfigError, match="goodput"):
            parse_goodput([wrong])


def test_metric_lists_are_checked() -> None:
    assert parse_metrics("ttft, itl") == ["ttft", "itl"]
    assert parse_percentiles("50,99.9") == [50.0, 99.9]
    with pytest.raises(ConfigError, match="unknown metric 'ttf'"):
        parse_metrics("ttf")
    with pytest.raises(ConfigError, match="between 0 and 100, got 101"):
        parse_percentiles("101")


def test_default_file_name() -> None:
    settings = ServeSettings(config=EngineConfig(model="org/name"), dataset=DATASET, arrivals=ArrivalProcess(request_rate=2.5))
    assert default_file_name(settings, "D") == "aioengine-2.5qps-name-D.json"
    assert math.isinf(ServeSettings(config=CONFIG, dataset=DATASET).arrivals.request_rate)


@pytest.mark.parametrize("command", ["throughput", "latency", "serve", "sweep", "overhead", "kernels", "compare", "report"])
def test_each_benchmark_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["bench", command, "--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: aioengine bench {command}")
    assert f"  aioengine bench {command}" in text.split("examples:")[1]
    assert "(default: None)" not in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "--request-rate", "0"], "request_rate must be above 0"),
        (
            ["serve", "--request-rate", "2", "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2"],
            "not both",
        ),
        (["serve", "--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps"),
        (["serve", "--ramp-up-end-rps", "3"], "need a --ramp-up-strategy"),
        (["serve", "--goodput", "speed:1"], "goodput takes NAME:MILLISECONDS"),
        (["serve", "--metadata", "nothing"], "KEY=VALUE"),
        (["serve", "--dataset-name", "sharegpt"], "--dataset-path"),
        (["latency", "--batch-size", "0"], "batch_size must be at least 1"),
        (["overhead", "--num-reqs", "a"], "not a list of numbers"),
    ],
)
def test_mistakes_are_one_line_and_status_2(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(["bench", *args])
    except SystemExit as leaving:
        status = leaving.code
    captured = capsys.readouterr()
    assert status == 2
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


# ---------------------------------------------------------------------------------------------------- Ctrl-C
INTERRUPTED = """
import sys
from aioengine.commands import runtime
from aioengine.engine.async_engine import AsyncEngine
from aioengine.testing import FakeExecutor, FakeTokenizer

def make(config, **options):
    return AsyncEngine(config, executor=FakeExecutor(num_blocks=1025), tokenizer=FakeTokenizer(), record=options["record"])

runtime.AsyncEngine = make
from aioengine.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_leaves_a_valid_partial_result(tmp_path: Path) -> None:
    args = ["bench", "serve", "--request-rate", "20", "--num-prompts", "1000", "--input-len", "8", "--output-len", "4"]
    steps = tmp_path / "steps.jsonl"
    args += ["--record", str(steps), "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (not steps.exists() or steps.stat().st_size < 30_000):  # some requests are through
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    assert b"Interrupted:" in out
    (result,) = read_results(tmp_path / "r.json")
    check_schema(result, {key: kind for key, kind in SERVE_SCHEMA.items() if not key.startswith(("mean", "median", "std", "p99"))})
    assert result["interrupted"] is True
    assert 0 < result["completed"] < 1000
