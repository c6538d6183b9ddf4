"""No flag does nothing in silence: it changes what is asked or measured, or it is refused."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from aioengine.cli import main
from aioengine.errors import ConfigError
from aioengine.testing import FakeTokenizer
from aioengine_bench import settings as bench_settings
from aioengine_bench.datasets import load_dataset
from aioengine_bench.flags import add_dataset_options, add_load_options, arrival_process, dataset_spec
from aioengine_bench.options import add_options, given, option, refuse_unused
from aioengine_bench.specs import WORKLOADS
from aioengine_bench.workloads import workload_names

DATASET_VALUES = {
    "--input-len": "7",
    "--output-len": "9",
    "--random-range-ratio": "0.5",
    "--random-prefix-len": "3",
    "--prefix-repetition-prefix-len": "5",
    "--prefix-repetition-suffix-len": "6",
    "--prefix-repetition-num-prefixes": "2",
    "--prefix-repetition-output-len": "4",
    "--burst-size": "2",
    "--burst-interval": "1",
    "--num-prompts": "1",
    "--dataset-path": "given",
}


@pytest.fixture
def choices(tmp_path: Path) -> dict[str, list[str]]:
    """The flags that choose each dataset, and a file where it needs one."""
    conversation = {"conversations": [{"value": "one two three four"}, {"value": "five six seven eight"}]}
    contents = {
        "sharegpt": json.dumps([conversation, conversation]),
        "custom": '{"prompt": "a"}\n{"prompt": "b"}',
        "timed_trace": "".join(f'{{"timestamp": {i}, "input_length": 3, "output_length": 2}}\n' for i in range(3)),
    }
    chosen = {name: ["--dataset-name", name] for name in ("random", "text", "prefix_repetition", "burst")}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
        chosen[name] = ["--dataset-name", name, "--dataset-path", str(tmp_path / name)]
    return chosen | {"workload": ["--workload", "long"]}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_dataset_options(parser, num_prompts=20)
    add_load_options(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("flag", DATASET_VALUES)
def test_a_dataset_option_changes_the_requests_or_is_refused(flag: str, choices: dict[str, list[str]]) -> None:
    for name, chosen in choices.items():
        if flag == "--dataset-path" and flag in chosen:
            continue
        before = load_dataset(dataset_spec(parse(chosen)), FakeTokenizer(), vocab_size=261)
        with contextlib.suppress(ConfigError):
            spec = dataset_spec(parse([*chosen, flag, DATASET_VALUES[flag]]))
            assert load_dataset(spec, FakeTokenizer(), vocab_size=261) != before, f"{flag} has no effect on {name}"


def test_every_dataset_option_is_tried() -> None:
    parser = argparse.ArgumentParser()
    add_dataset_options(parser, num_prompts=4)
    known = {option for action in parser._actions for option in action.option_strings}
    assert known - set(DATASET_VALUES) == {
        *("-h", "--help", "--dataset-name", "--workload", "--seed", "--ignore-eos"),
        *("--random-input-len", "--random-output-len"),  # other names of two that are tried
    }


def test_zero_is_a_value() -> None:
    spec = dataset_spec(parse(["--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "0"]))
    assert spec.prefix_len == 0
    requests = load_dataset(spec, FakeTokenizer(), vocab_size=261)
    assert {request.prompt_len for request in requests} == {256}
    with pytest.raises(ConfigError, match="output_len must be at least 1, got 0"):
        dataset_spec(parse(["--dataset-name", "prefix_repetition", "--output-len", "0"]))


def test_a_workload_can_be_cut_and_not_stretched() -> None:
    spec = dataset_spec(parse(["--workload", "long", "--num-prompts", "3"]))
    assert len(load_dataset(spec, FakeTokenizer(), vocab_size=50000)) == 3
    with pytest.raises(ConfigError, match="--num-prompts is 9, but the workload long has 8"):
        dataset_spec(parse(["--workload", "long", "--num-prompts", "9"]))
    with pytest.raises(ConfigError, match="leave out --dataset-name random"):
        dataset_spec(parse(["--workload", "long", "--dataset-name", "random"]))


def test_two_names_for_one_thing_are_not_both_given() -> None:
    with pytest.raises(ConfigError, match="say the same thing twice"):
        dataset_spec(parse(["--dataset-name", "prefix_repetition", "--input-len", "5", "--prefix-repetition-suffix-len", "6"]))


def test_burstiness_needs_a_rate() -> None:
    with pytest.raises(ConfigError, match=r"--burstiness 0\.5 has no effect"):
        arrival_process(parse(["--burstiness", "0.5"]))
    assert arrival_process(parse(["--burstiness", "0.5", "--request-rate", "2"])).burstiness == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "--target", "sm_90"], "--target needs --compile-report"),
        (["kernels", "--compile-report", "--op", "rms_norm"], "--op has no effect on --compile-report"),
        (["kernels", "--compile-report", "--save-result"], "has an effect on it"),
        (["compare", "--num-reqs", "32"], "--num-reqs needs --host-cost"),
        (["compare", "--host-cost", "--workload", "long"], "--workload has no effect on --host-cost"),
        (["serve", "--save-detailed"], "--save-detailed changes nothing but the result"),
        (["serve", "--metadata", "duration=5", "--save-result"], "own keys: duration"),
        (["throughput", "--metadata", "elapsed_time=5", "--save-result"], "own keys: elapsed_time"),
        (["latency", "--metadata", "latencies=5", "--save-result"], "own keys: latencies"),
        (["overhead", "--metadata", "growth=5", "--save-result"], "own keys: growth"),
        (["compare", "--engines", "aioengine", "--metadata", "errors=5", "--save-result"], "own keys: errors"),
        (["sweep", "--metadata", "rows=1"], "own keys: rows"),
        (["sweep", "--max-concurrencies", "1", "--max-concurrency", "2"], "say the same thing twice"),
        (["sweep", "--find-saturation", "--max-concurrency", "2"], "leave out --max-concurrency"),
        (["sweep", "--append-result"], "nothing is added"),
        (["throughput", "--num-runs", "0"], "num_runs must be at least 1"),
        (["serve", "--events-token", "x"], "--events-token needs --events"),
        (["serve", "--events-text"], "--events-text needs --events or --record"),
        (["serve", "--output-json", "/"], "it is a folder"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_the_names_of_workloads_are_those_of_the_file() -> None:
    assert tuple(workload_names()) == WORKLOADS


@dataclasses.dataclass(frozen=True)
class _Settings:
    plain: str
    num_runs: int = option(3, "runs")
    rates: Sequence[float] = option((), "rates", unset="")
    kind: Literal["a", "b"] | None = option(None, "which")
    names: Sequence[str] = option((), "names", "--name", action="append", metavar="NAME", unset="all")
    is_dry: bool = option(False, "only list")
    limits: dict[str, str] = option({}, "limits", "--limit", nargs="+", convert=lambda items: dict(item.split(":") for item in items))
    title: str = option("none", "its title", group="words")


def test_an_option_is_stated_once() -> None:
    """Flag, type, choices, default and help come from the field, and so does the way back."""
    parser = argparse.ArgumentParser()
    add_options(parser, _Settings)
    add_options(parser, _Settings, group="words", texts={"title": "what it is called"})
    shown = " ".join(parser.format_help().split())
    for text in ("--num-runs N runs (default: 3)", "--rates X,... rates", "--kind {a,b} which", "--name NAME names (default: all)"):
        assert text in shown
    assert "words: --title TITLE what it is called (default: none)" in shown
    assert _Settings("p", **given(parser.parse_args([]), _Settings)) == _Settings("p")
    args = parser.parse_args(
        [
            "--rates",
            "1,2.5",
            "--kind",
            "b",
            "--name",
            "x",
            "--name",
            "y",
            "--is-dry",
            "--limit",
            "u:v",
            "w:x",
            "--title",
            "t",
            "--num-runs",
            "0",
        ]
    )
    assert given(args, _Settings) == {
        "num_runs": 0,
        "rates": (1.0, 2.5),
        "kind": "b",
        "names": ("x", "y"),
        "is_dry": True,
        "limits": {"u": "v", "w": "x"},
        "title": "t",
    }
    with pytest.raises(ConfigError, match="--num-runs is no use"):
        refuse_unused(args, ["num_runs"], "is no use")


@pytest.mark.parametrize("command", ["throughput", "latency", "serve", "sweep", "overhead", "kernels", "compare", "report"])
def test_every_command_without_options_has_the_defaults_of_its_settings(command: str) -> None:
    settings = getattr(bench_settings, "KernelSettings" if command == "kernels" else f"{command.capitalize()}Settings")
    parser = argparse.ArgumentParser()
    add_options(parser, settings)
    assert given(parser.parse_args([]), settings) == {}
