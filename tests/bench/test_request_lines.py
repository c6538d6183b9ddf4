"""What is known of single requests: the JSON lines, failure reasons and queue delays; and the stop of a server that falls behind."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine_bench.arrivals import ArrivalProcess
from aioengine_bench.console import reason_lines
from aioengine_bench.serve import serve
from aioengine_bench.settings import ServeSettings
from aioengine_bench.specs import DatasetSpec, RemoteSpec, SaveOptions
from tests.bench.conftest import FakeHost
from tests.server.sockets import serving

MakeHost = Callable[..., FakeHost]


def base_settings(folder: Path, **changes: Any) -> ServeSettings:
    return dataclasses.replace(
        ServeSettings(
            config=EngineConfig(model="fake", seed=0, max_num_seqs=1, block_size=4),
            dataset=DatasetSpec(num_prompts=4, input_len=8, output_len=6),
            save=SaveOptions(output_json=str(folder / "r.json")),
            requests_jsonl=str(folder / "requests.jsonl"),
            num_warmups=0,
            disable_progress=True,
        ),
        **changes,
    )


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = (folder / "requests.jsonl").read_text().splitlines()
    return json.loads((folder / "r.json").read_text()), [json.loads(line) for line in lines]


async def test_a_line_a_request_with_what_was_asked_and_what_came(
    make_host: MakeHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One request at a time in the engine: all but the first wait in its queue, and that is part of their TTFT."""
    await serve(base_settings(tmp_path), make_host().host())
    result, lines = read(tmp_path)
    assert [line["request_id"] for line in lines] == [f"bench-{index}" for index in range(4)]
    for line in lines:
        assert (line["prompt_len"], line["expected_output_len"], line["output_tokens"]) == (8, 6, 6)
        assert (line["success"], line["outcome"], line["finish_reason"], line["error"]) == (True, "completed", "length", "")
        assert line["latency"] == pytest.approx(line["ttft"] + sum(line["itl"]))
        assert 0 <= line["queue_time"] <= line["ttft"] + 0.001
    queued = sorted(line["queue_time"] for line in lines)
    assert queued[0] < queued[1] < queued[2] < queued[3]
    assert result["mean_queue_time_ms"] == pytest.approx(sum(queued) / 4 * 1000)
    assert result["p99_queue_time_ms"] > result["median_queue_time_ms"]
    assert "Queue in the engine" in capsys.readouterr().out


async def test_lines_of_a_server_tell_failures_and_not_its_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = {
        "answers": [
            {"times": 1, "error": {"status": 503, "message": "too busy"}},
            {"times": 1, "text": "abcdefgh", "fail_after_tokens": 3},
        ]
    }
    async with serving(script) as served:
        settings = base_settings(tmp_path, remote=RemoteSpec(base_url=f"http://127.0.0.1:{served.port}"), max_concurrency=1)
        await serve(settings, FakeHost().host())
    result, lines = read(tmp_path)
    assert [(line["outcome"], line["finish_reason"]) for line in lines] == [("failed", None)] * 2 + [("completed", "length")] * 2
    assert [line["output_tokens"] for line in (lines[0], *lines[2:])] == [0, 6, 6]
    assert 1 <= lines[1]["output_tokens"] <= 3  # events may hold several tokens, which only the usage at the end would tell
    assert "too busy" in lines[0]["error"]
    assert (lines[0]["ttft"], lines[0]["latency"], lines[2]["queue_time"]) == (None, None, None)
    assert lines[3]["client_queue_time"] > lines[2]["client_queue_time"] > 0  # all were due at once
    assert result["mean_queue_time_ms"] is None
    assert result["mean_client_queue_time_ms"] == pytest.approx(sum(line["client_queue_time"] for line in lines[2:]) / 2 * 1000)
    shown = capsys.readouterr().out
    assert "Requests not completed" in shown
    assert re.search(r"1 x .*HTTP 503: too busy", shown)


async def test_a_file_that_cannot_be_written_is_refused_before_the_run(make_host: MakeHost, tmp_path: Path) -> None:
    host = make_host()
    with pytest.raises(ConfigError, match="it is a folder"):
        await serve(base_settings(tmp_path, requests_jsonl=str(tmp_path)), host.host())
    assert not host.engines


def test_reasons_are_cut_to_a_line_and_the_rest_is_counted() -> None:
    reasons = {"A: first\nsecond": 3, "A: first\nother": 2, **{f"B{index}": 1 for index in range(6)}, "x" * 200: 9}
    assert reason_lines(reasons) == [
        f"    9 x {'x' * 157}...",
        "    5 x A: first",
        "    1 x B0",
        "    1 x B1",
        "    1 x B2",
        "    3 for 3 other reasons",
    ]
    assert reason_lines({"": 2}) == ["    2 x no reason given"]


async def test_a_server_that_falls_behind_ends_the_run_over_real_sockets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each prompt takes it 2 s, and a request comes every 10 ms: the fifth that waits is one too many."""
    async with serving({"prefill_tokens_per_s": 4}) as served:
        settings = base_settings(
            tmp_path,
            remote=RemoteSpec(base_url=f"http://127.0.0.1:{served.port}"),
            dataset=DatasetSpec(num_prompts=200, input_len=8, output_len=6),
            arrivals=ArrivalProcess(request_rate=100.0, burstiness=float("inf")),
            max_waiting=4,
        )
        await serve(settings, FakeHost().host())
    result, lines = read(tmp_path)
    assert result["stop_reason"] == "over-saturated: 5 requests wait for their first token, and --max-waiting is 4"
    assert (result["completed"], result["aborted"], result["num_not_sent"]) == (0, 5, 195)
    assert [line["error"] for line in lines] == ["the run was stopped"] * 5
    assert result["duration"] < 1.5
    assert "Stopped: over-saturated" in capsys.readouterr().out
