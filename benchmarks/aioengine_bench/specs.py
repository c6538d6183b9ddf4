"""What several benchmarks are told: which requests, how they sample, where the result goes. The options come from the fields.

Imports nothing heavy: the help must answer at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from aioengine.errors import ConfigError
from aioengine_bench.options import option

DatasetName = Literal["random", "sharegpt", "text", "prefix_repetition", "burst", "timed_trace", "custom"]
WorkloadName = Literal["mixed", "shared_prefix", "single", "long"]
DATASET_NAMES: tuple[DatasetName, ...] = get_args(DatasetName)
WORKLOADS: tuple[WorkloadName, ...] = get_args(WorkloadName)

# The titles that the options stand under.
RESULT, SAMPLING, DATASET, LOAD, METRIC = (f"{name} options" for name in ("result", "sampling", "dataset", "load", "metric"))


def parse_metadata(items: Iterable[str]) -> dict[str, str]:
    """["gpu=none", ...] -> a dict. Raises ConfigError."""
    metadata: dict[str, str] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"metadata must look like KEY=VALUE, got {item!r}")
        metadata[key.strip()] = value.strip()
    return metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Where the result goes. append: one more line of an existing file. output_json: "-" is stdout."""

    save: bool = option(False, "write the result to a JSON file", "--save-result", group=RESULT)
    detailed: bool = option(
        False, "the saved result has every request's lengths, latencies, text and error", "--save-detailed", group=RESULT
    )
    append: bool = option(False, "add the result as a line to an existing file", "--append-result", group=RESULT)
    folder: str | None = option(
        None, "save the result, in this folder", "--result-dir", metavar="DIR", unset="the current one", group=RESULT
    )
    filename: str | None = option(
        None,
        "save the result, under this name",
        "--result-filename",
        metavar="NAME",
        unset="made of label, load, model and date",
        group=RESULT,
    )
    output_json: str | None = option(
        None, 'write the result to FILE as well; "-" is stdout, the text goes to stderr then', metavar="FILE", group=RESULT
    )
    metadata: Mapping[str, str] = option(
        {}, "keys of your own for the result", metavar="K=V", nargs="*", convert=parse_metadata, group=RESULT
    )
    label: str | None = option(None, "what to call this run", metavar="TEXT", unset="aioengine", group=RESULT)

    @property
    def saves(self) -> bool:
        """The result goes to a file: so it was said, or a file or folder was named."""
        return self.save or self.append or self.filename is not None or self.folder is not None

    @property
    def claims_stdout(self) -> bool:
        return self.output_json == "-"

    def path(self, default_name: str) -> Path:
        return Path(self.folder or ".") / (self.filename or default_name)


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How every request of a run samples; greedy by default, so that runs can be compared."""

    temperature: float = option(0.0, "0 is greedy", group=SAMPLING)
    top_p: float = option(1.0, "keep the tokens that add up to X", unset="1, all", group=SAMPLING)
    top_k: int = option(0, "keep the N most likely tokens", unset="0, all", group=SAMPLING)
    min_p: float = option(0.0, "drop tokens below X times the best", group=SAMPLING)
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """Which requests, and how many. Fields that a dataset does not use are ignored.

    input_len, output_len: tokens; None takes the dataset's own. range_ratio: random lengths are drawn from
    len * (1 - ratio) to len * (1 + ratio). prefix_len: tokens that all prompts begin with, on top of input_len.
    """

    name: DatasetName = option("random", "what to ask", "--dataset-name", group=DATASET)
    path: str | None = option(
        None, "for sharegpt (JSON), timed_trace and custom (JSON lines)", "--dataset-path", metavar="FILE", group=DATASET
    )
    workload: WorkloadName | None = option(None, "a fixed workload in place of a dataset: the same tokens for every engine", group=DATASET)
    num_prompts: int = option(1000, "how many requests", group=DATASET)
    seed: int = option(0, "of the dataset, the arrivals and the sampling", group=DATASET)
    input_len: int | None = option(
        None, "prompt tokens", "--input-len", "--random-input-len", unset="the dataset's; random 1024", group=DATASET
    )
    output_len: int | None = option(
        None, "output tokens", "--output-len", "--random-output-len", unset="the dataset's; random 128", group=DATASET
    )
    range_ratio: float = option(0.0, "lengths vary by up to this share, both ways", "--random-range-ratio", group=DATASET)
    prefix_len: int = option(0, "tokens that all prompts begin with, on top", "--random-prefix-len", group=DATASET)
    num_prefixes: int = 10
    burst_size: int = option(16, "requests that come at once", group=DATASET)
    burst_interval: float = option(4.0, "seconds between bursts", metavar="S", group=DATASET)
    ignore_eos: bool | None = option(None, "go on after end-of-sequence", unset="where lengths are made up", group=DATASET)

    def __post_init__(self) -> None:
        for field, least in (("num_prompts", 1), ("prefix_len", 0), ("num_prefixes", 1), ("burst_size", 1)):
            if getattr(self, field) < least:
                raise ConfigError(f"{field} must be at least {least}, got {getattr(self, field)}")
        for field in ("input_len", "output_len"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"{field} must be at least 1, got {value}")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"range_ratio must be in [0, 1), got {self.range_ratio}")
        if not (math.isfinite(self.burst_interval) and self.burst_interval > 0):
            raise ConfigError(f"burst_interval must be above 0 seconds, got {self.burst_interval}")
        if self.workload is None and self.path is None and self.name in ("sharegpt", "timed_trace", "custom"):
            raise ConfigError(f"the dataset {self.name!r} needs a file: --dataset-path")
        if self.workload is not None and self.workload not in WORKLOADS:
            raise ConfigError(f"there is no workload {self.workload!r}, only {', '.join(WORKLOADS)}")

    @property
    def label(self) -> str:
        return self.workload or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRepetition:
    """The options of the dataset of that name; they become a `DatasetSpec` like those of the others."""

    prefix_len: int = option(256, "tokens of each repeated prefix", "--prefix-repetition-prefix-len", group=DATASET)
    suffix_len: int = option(256, "tokens of one's own", "--prefix-repetition-suffix-len", group=DATASET)
    num_prefixes: int = option(10, "different prefixes", "--prefix-repetition-num-prefixes", group=DATASET)
    output_len: int = option(128, "output tokens", "--prefix-repetition-output-len", group=DATASET)


def progress_option() -> Any:
    """A field for those that show a bar."""
    return option(False, "no progress bar (there is none where stderr is no terminal)", "--disable-tqdm", group=RESULT)
