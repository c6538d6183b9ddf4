"""The page is one file that needs nothing else, whatever goes in."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from aioengine.config import EngineConfig
from aioengine.engine.publish_options import PublishOptions
from aioengine.errors import ConfigError
from aioengine_bench import svg
from aioengine_bench.arrivals import ArrivalProcess
from aioengine_bench.overhead import overhead
from aioengine_bench.report import Input, make_page, report
from aioengine_bench.serve import serve
from aioengine_bench.settings import OverheadSettings, ReportSettings, ServeSettings
from aioengine_bench.specs import DatasetSpec, SaveOptions
from tests.bench.conftest import FakeHost

VOID = {"meta", "line", "rect", "circle", "path"}


class Checker(HTMLParser):
    """Every element is closed in order, and none refers to anything outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert tag not in ("script", "link", "img", "iframe", "object"), tag
        assert not {name for name, _ in attrs} & {"src", "href", "xlink:href"}, attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def check_page(page: str) -> list[str]:
    addresses = set(re.findall(r"https?://[^\"' <]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}, "only the SVG namespace, which nobody fetches"
    assert "@import" not in page
    assert "url(" not in page
    assert "nan" not in page.lower().split('viewbox="')[-1].split('"')[0]
    assert not re.search(r'="(nan|inf|-inf)', page)
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker.tags


@pytest.fixture
def files(tmp_path: Path, make_host: Callable[..., FakeHost]) -> list[str]:
    """Two serving results, a recording, an overhead result."""
    host = make_host().host()
    for index, rate in enumerate((50.0, 200.0)):
        settings = ServeSettings(
            config=EngineConfig(model="fake", seed=0, block_size=4),
            dataset=DatasetSpec(num_prompts=6, input_len=8, output_len=4),
            arrivals=ArrivalProcess(request_rate=rate),
            save=SaveOptions(save=True, detailed=True, folder=str(tmp_path), filename=f"serve{index}.json"),
            publish=PublishOptions(record=str(tmp_path / "steps.jsonl")),
        )
        asyncio.run(serve(settings, host))
    save = SaveOptions(save=True, folder=str(tmp_path), filename="overhead.json")
    asyncio.run(overhead(OverheadSettings(num_reqs=[1, 3], num_steps=10, save=save)))
    return [str(path) for path in sorted(tmp_path.iterdir())]


def test_a_page_of_everything(files: list[str], tmp_path: Path) -> None:
    report(ReportSettings(inputs=files, output=str(tmp_path / "out" / "report.html"), title="A & B"))
    page = (tmp_path / "out" / "report.html").read_text()
    tags = check_page(page)
    assert tags.count("svg") == 4 + 4 + 1, "four charts of serving, four of the recording, one of the overhead"
    for text in ("Throughput and latency", "Time to first token", "Inter-token latency", "KV cache in use", "A &amp; B", "50 req/s"):
        assert text in page


def test_results_without_any_success_make_a_page() -> None:
    empty: dict[str, Any] = {
        "benchmark": "serve",
        "output_throughput": None,
        "ttfts": [None],
        "itls": [[]],
        "request_rate": "inf",
        "completed": 0,
    }
    check_page(make_page([Input("r.json", [empty, empty])], title="t"))


def test_names_are_escaped() -> None:
    page = make_page([Input("<script>.json", [{"benchmark": "latency", "label": "<b>x</b>", "batch_size": 1}])], title="<i>")
    check_page(page)
    assert "&lt;b&gt;x&lt;/b&gt;" in page


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("output_throughput", "fast"),
        ("request_rate", []),
        ("ttfts", [[1]]),
        ("itls", [1]),
        ("p99_ttft_ms", True),
        ("rows", {}),
        ("environment", 1),
    ],
)
def test_a_figure_that_is_none_is_named_with_its_place(key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"benchmark": "serve", "output_throughput": 1.0}) + "\n" + json.dumps({"benchmark": "serve", key: value}))
    with pytest.raises(ConfigError, match=rf"r\.json, result 2: .*{key}"):
        report(ReportSettings(inputs=[str(path)], output=str(tmp_path / "o.html")))


@pytest.mark.parametrize("benchmark", ["overhead", "host-cost", "compare"])
def test_rows_without_their_figures_make_a_page(benchmark: str) -> None:
    check_page(
        make_page([Input("r", [{"benchmark": benchmark, "rows": [{"engine": "a"}, {"mode": "decode", "watcher": "nobody"}]}])], title="t")
    )


def test_names_of_any_length_stay_in_the_picture() -> None:
    bars = svg.bar_chart("t", [("openvino:" + "x" * 200, 3.0), ("b", 2.0)], x_label="x")
    assert "x" * 60 not in bars.split("</title>")[1]
    chart = svg.line_chart(
        "t", [svg.Series(f"max_num_seqs={n}, max_num_batched_tokens=256", [(1, 2)]) for n in range(3)], x_label="x", y_label="y"
    )
    starts = [float(x) for x in re.findall(r'<text x="([0-9.]+)" y="[0-9]+" class="tick">max', chart)]
    assert len(starts) == 3
    assert max(starts) < svg.WIDTH / 2, "one below the other"


def test_a_file_that_is_neither_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("hello")
    with pytest.raises(ConfigError, match=r"x\.json"):
        report(ReportSettings(inputs=[str(path)], output="-"))


@pytest.mark.parametrize("points", [[], [(1.0, 2.0)], [(0.0, 0.0), (0.0, 0.0)], [(1e9, 1e-9), (2e9, 3e-9)]])
def test_charts_of_few_or_odd_points(points: list[tuple[float, float]]) -> None:
    check_page(svg.line_chart("t", [svg.Series("s", points)], x_label="x", y_label="y"))
    check_page(svg.distribution("t", [("s", [y for _, y in points])], x_label="x"))
    check_page(svg.bar_chart("t", [(str(x), y) for x, y in points], x_label="x"))
