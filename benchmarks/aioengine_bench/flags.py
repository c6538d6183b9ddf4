"""The flags that several benchmarks share, and the settings that they become.

Imports nothing heavy: the help must answer at once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioengine_bench.arrivals import ArrivalProcess
    from aioengine_bench.client import SamplingSpec
    from aioengine_bench.datasets import DatasetSpec
    from aioengine_bench.results import SaveOptions

_DATASETS = ("random", "sharegpt", "text", "prefix_repetition", "burst", "timed_trace", "custom")
WORKLOADS = ("mixed", "shared_prefix", "single", "long")


def add_save_options(parser: argparse.ArgumentParser, *, detailed: bool = True) -> None:
    group = parser.add_argument_group("result options")
    add = group.add_argument
    add("--save-result", action="store_true", help="write the result to a JSON file")
    if detailed:
        add("--save-detailed", action="store_true", help="with every request's lengths, latencies, text and error in it")
    add("--append-result", action="store_true", help="add the result as a line to an existing file")
    add("--result-dir", metavar="DIR", help="folder of the file (default: the current one)")
    add("--result-filename", metavar="NAME", help="name of the file (default: made of label, load, model and date)")
    add("--output-json", metavar="FILE", help='write the result to FILE as well; "-" is stdout, the text goes to stderr then')
    add("--metadata", metavar="K=V", nargs="*", default=[], help="keys of your own for the result")
    add("--label", metavar="TEXT", help="what to call this run (default: aioengine)")
    add("--disable-tqdm", action="store_true", help="no progress bar (there is none where stderr is no terminal)")


def save_options(args: argparse.Namespace) -> SaveOptions:
    """Raises ConfigError."""
    from aioengine_bench.results import SaveOptions, parse_metadata

    return SaveOptions(
        save=args.save_result,
        detailed=getattr(args, "save_detailed", False),
        append=args.append_result,
        folder=args.result_dir,
        filename=args.result_filename,
        output_json=args.output_json,
        label=args.label,
        metadata=parse_metadata(args.metadata),
    )


def add_dataset_options(parser: argparse.ArgumentParser, *, num_prompts: int) -> None:
    group = parser.add_argument_group("dataset options")
    add = group.add_argument
    add("--dataset-name", choices=_DATASETS, default="random", help="what to ask (default: random)")
    add("--dataset-path", metavar="FILE", help="for sharegpt (JSON), timed_trace and custom (JSON lines)")
    add("--workload", choices=WORKLOADS, help="a fixed workload in place of a dataset: the same tokens for every engine")
    add("--num-prompts", type=int, metavar="N", default=num_prompts, help=f"how many requests (default: {num_prompts})")
    add("--seed", type=int, metavar="N", default=0, help="of the dataset, the arrivals and the sampling (default: 0)")
    add("--input-len", "--random-input-len", type=int, metavar="N", help="prompt tokens (default: the dataset's; random 1024)")
    add("--output-len", "--random-output-len", type=int, metavar="N", help="output tokens (default: the dataset's; random 128)")
    add("--random-range-ratio", type=float, metavar="X", default=0.0, help="lengths vary by up to this share, both ways (default: 0)")
    add("--random-prefix-len", type=int, metavar="N", default=0, help="tokens that all prompts begin with, on top (default: 0)")
    add("--prefix-repetition-prefix-len", type=int, metavar="N", default=256, help="tokens of each repeated prefix (default: 256)")
    add("--prefix-repetition-suffix-len", type=int, metavar="N", default=256, help="tokens of one's own (default: 256)")
    add("--prefix-repetition-num-prefixes", type=int, metavar="N", default=10, help="different prefixes (default: 10)")
    add("--prefix-repetition-output-len", type=int, metavar="N", default=128, help="output tokens (default: 128)")
    add("--burst-size", type=int, metavar="N", default=16, help="requests that come at once (default: 16)")
    add("--burst-interval", type=float, metavar="S", default=4.0, help="seconds between bursts (default: 4)")
    add("--ignore-eos", action="store_true", default=None, help="go on after end-of-sequence (default: where lengths are made up)")


def dataset_spec(args: argparse.Namespace) -> DatasetSpec:
    """Raises ConfigError."""
    from aioengine_bench.datasets import DatasetSpec
    from aioengine_bench.workloads import load_workload

    repeats = args.dataset_name == "prefix_repetition"
    num_prompts = args.num_prompts if args.workload is None else len(load_workload(args.workload).requests)
    return DatasetSpec(
        name=args.dataset_name,
        workload=args.workload,
        path=args.dataset_path,
        num_prompts=num_prompts,
        seed=args.seed,
        input_len=(args.input_len or args.prefix_repetition_suffix_len) if repeats else args.input_len,
        output_len=(args.output_len or args.prefix_repetition_output_len) if repeats else args.output_len,
        range_ratio=args.random_range_ratio,
        prefix_len=args.prefix_repetition_prefix_len if repeats else args.random_prefix_len,
        num_prefixes=args.prefix_repetition_num_prefixes,
        burst_size=args.burst_size,
        burst_interval=args.burst_interval,
        ignore_eos=args.ignore_eos,
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling options")
    group.add_argument("--temperature", type=float, metavar="X", default=0.0, help="0 is greedy (default: 0)")
    group.add_argument("--top-p", type=float, metavar="X", default=1.0, help="keep the tokens that add up to X (default: 1, all)")
    group.add_argument("--top-k", type=int, metavar="N", default=0, help="keep the N most likely tokens (default: 0, all)")
    group.add_argument("--min-p", type=float, metavar="X", default=0.0, help="drop tokens below X times the best (default: 0)")


def sampling_spec(args: argparse.Namespace) -> SamplingSpec:
    from aioengine_bench.client import SamplingSpec

    return SamplingSpec(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, min_p=args.min_p, seed=args.seed)


def add_load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load options")
    add = group.add_argument
    add("--request-rate", type=float, metavar="X", default=math.inf, help="requests a second; inf sends all at once (default: inf)")
    add("--burstiness", type=float, metavar="X", default=1.0, help="1 is Poisson, less is burstier, inf is even (default: 1)")
    add("--max-concurrency", type=int, metavar="N", help="requests out at once; the others wait in the client (default: no limit)")
    add("--ramp-up-strategy", choices=("linear", "exponential"), help="let the rate grow over the run, in place of --request-rate")
    add("--ramp-up-start-rps", type=float, metavar="X", help="requests a second at the start of the ramp")
    add("--ramp-up-end-rps", type=float, metavar="X", help="requests a second at its end")


def arrival_process(args: argparse.Namespace) -> ArrivalProcess:
    """Raises ConfigError."""
    from aioengine.errors import ConfigError
    from aioengine_bench.arrivals import ArrivalProcess, RampUp

    ends = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if args.ramp_up_strategy is None:
        if ends != (None, None):
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need a --ramp-up-strategy")
        return ArrivalProcess(request_rate=args.request_rate, burstiness=args.burstiness)
    if None in ends:
        raise ConfigError("a ramp-up needs --ramp-up-start-rps and --ramp-up-end-rps")
    ramp = RampUp(args.ramp_up_strategy, *ends)
    return ArrivalProcess(request_rate=args.request_rate, burstiness=args.burstiness, ramp_up=ramp)


def add_metric_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("metric options")
    add = group.add_argument
    add("--percentile-metrics", metavar="NAMES", default="ttft,tpot,itl,e2el", help="which latencies (default: ttft,tpot,itl,e2el)")
    add("--metric-percentiles", metavar="NUMBERS", default="99", help="which percentiles of them (default: 99)")
    add("--goodput", metavar="NAME:MS", nargs="+", default=[], help="limits in ms on ttft, tpot, e2el: also report requests that keep all")


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: "1,2,4" -> [1, 2, 4]."""

    def parse(text: str) -> list[Any]:
        try:
            return [kind(item) for item in text.split(",") if item.strip()]
        except ValueError as exc:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,2,4") from exc

    return parse
