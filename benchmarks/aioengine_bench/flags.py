"""The options that several benchmarks share, and the specifications that they become.

Imports nothing heavy: the help must answer at once.
"""

from __future__ import annotations

import argparse
import math

from aioengine.errors import ConfigError
from aioengine_bench.arrivals import ArrivalProcess, RampUp
from aioengine_bench.options import add_options, given, refuse_unused
from aioengine_bench.settings import ServeSettings
from aioengine_bench.specs import (
    DATASET,
    LOAD,
    METRIC,
    RESULT,
    SAMPLING,
    SERVER,
    DatasetName,
    DatasetSpec,
    PrefixRepetition,
    RemoteSpec,
    SamplingSpec,
    SaveOptions,
)


def add_save_options(parser: argparse.ArgumentParser, *, detailed: bool = True) -> None:
    """The options that save a result. detailed: also the one that saves details of each request."""
    add_options(parser, SaveOptions, group=RESULT, leave_out=() if detailed else ("detailed",))
    add_options(parser, ServeSettings, group=RESULT)  # the bar: the same for all


def add_dataset_options(parser: argparse.ArgumentParser, *, num_prompts: int) -> None:
    parser.set_defaults(default_num_prompts=num_prompts)
    add_options(parser, DatasetSpec, group=DATASET, unset={"num_prompts": f"{num_prompts}; of a workload, all"})
    add_options(parser, PrefixRepetition, group=DATASET)


# Which of the options of a `DatasetSpec` mean something to which dataset; `seed`, `num_prompts` and `ignore_eos` do to all.
_LENGTHS = ("input_len", "output_len", "random_prefix_len")
_USED: dict[str, tuple[str, ...]] = {
    "random": (*_LENGTHS, "random_range_ratio"),
    "text": _LENGTHS,
    "burst": (*_LENGTHS, "random_range_ratio", "burst_size", "burst_interval"),
    "prefix_repetition": (
        *("input_len", "output_len", "prefix_repetition_prefix_len", "prefix_repetition_suffix_len"),
        *("prefix_repetition_num_prefixes", "prefix_repetition_output_len"),
    ),
    "sharegpt": ("dataset_path", "output_len"),
    "custom": ("dataset_path", "output_len"),
    "timed_trace": ("dataset_path",),
    "workload": (),
}
_DATASET_OPTIONS = tuple(dict.fromkeys(name for names in _USED.values() for name in names))


def dataset_spec(args: argparse.Namespace) -> DatasetSpec:
    """Raises ConfigError, also for an option that the dataset makes no use of."""
    if args.workload is not None and args.dataset_name is not None:
        raise ConfigError(f"--workload {args.workload} takes the place of a dataset: leave out --dataset-name {args.dataset_name}")
    name: DatasetName = args.dataset_name or "random"
    used, what = (_USED[name], f"the dataset {name!r}") if args.workload is None else (_USED["workload"], f"--workload {args.workload}")
    refuse_unused(args, [option for option in _DATASET_OPTIONS if option not in used], f"has no effect on {what}")
    values = {"num_prompts": args.default_num_prompts, **given(args, DatasetSpec)}
    if args.workload is not None:
        from aioengine_bench.workloads import load_workload

        most = len(load_workload(args.workload).requests)
        values["num_prompts"] = most if args.num_prompts is None else args.num_prompts
        if values["num_prompts"] > most:
            raise ConfigError(f"--num-prompts is {args.num_prompts}, but the workload {args.workload} has {most} requests")
    if name == "prefix_repetition":
        values |= _prefix_repetition(args)
    return DatasetSpec(**values)


def _prefix_repetition(args: argparse.Namespace) -> dict[str, int]:
    """The options of that dataset, some of which mean the same as those of all."""
    for first, second in (("input_len", "prefix_repetition_suffix_len"), ("output_len", "prefix_repetition_output_len")):
        if getattr(args, first) is not None and getattr(args, second) is not None:
            raise ConfigError(f"--{first.replace('_', '-')} and --{second.replace('_', '-')} say the same thing twice: give one of them")
    own = PrefixRepetition(**given(args, PrefixRepetition))
    return {
        "input_len": own.suffix_len if args.input_len is None else args.input_len,
        "output_len": own.output_len if args.output_len is None else args.output_len,
        "prefix_len": own.prefix_len,
        "num_prefixes": own.num_prefixes,
    }


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser, SamplingSpec, group=SAMPLING)


def sampling_spec(args: argparse.Namespace) -> SamplingSpec:
    return SamplingSpec(**given(args, SamplingSpec), seed=0 if args.seed is None else args.seed)


def add_load_options(parser: argparse.ArgumentParser) -> None:
    for settings in (ArrivalProcess, ServeSettings, RampUp):
        add_options(parser, settings, group=LOAD)


def arrival_process(args: argparse.Namespace) -> ArrivalProcess:
    """Raises ConfigError."""
    ramp = None
    if args.ramp_up_strategy is None:
        if args.ramp_up_start_rps is not None or args.ramp_up_end_rps is not None:
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need a --ramp-up-strategy")
        if args.burstiness is not None and (args.request_rate is None or math.isinf(args.request_rate)) and not _chooses_rates(args):
            raise ConfigError(f"--burstiness {args.burstiness:g} has no effect where all requests are sent at once: give a rate")
    elif args.ramp_up_start_rps is None or args.ramp_up_end_rps is None:
        raise ConfigError("a ramp-up needs --ramp-up-start-rps and --ramp-up-end-rps")
    else:
        ramp = RampUp(**given(args, RampUp))
    return ArrivalProcess(**given(args, ArrivalProcess), ramp_up=ramp)


def _chooses_rates(args: argparse.Namespace) -> bool:
    """Of a sweep: it sends at rates other than --request-rate."""
    return bool(getattr(args, "request_rates", None) or getattr(args, "find_saturation", None))


def add_metric_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ServeSettings, group=METRIC)


def add_remote_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser, RemoteSpec, group=SERVER)


_KEPT_ENGINE_OPTIONS = ("engine_tokenizer",)


def remote_spec(args: argparse.Namespace) -> RemoteSpec | None:
    """The server to measure; None: none. Raises ConfigError for options that would do nothing."""
    values = given(args, RemoteSpec)
    if "base_url" not in values:
        if values:
            refuse_unused(args, ("backend", "endpoint", "served_model_name", "send_text"), "needs --base-url")
        return None
    for name in vars(args):
        if name.startswith("engine_") and name not in _KEPT_ENGINE_OPTIONS:
            flag = name.removeprefix("engine_").replace("_", "-")
            raise ConfigError(f"--{flag} is a setting of an engine in this process: it has no effect on the server at --base-url")
    refuse_unused(args, ("record", "events"), "shows an engine in this process: it has no effect with --base-url")
    if args.send_text and args.backend == "openai-chat":
        raise ConfigError("--send-text has no effect on --backend openai-chat, which always sends text")
    return RemoteSpec(**values)
