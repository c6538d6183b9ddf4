"""The flags that several benchmarks share, and the settings that they become.

Imports nothing heavy: the help must answer at once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioengine_bench.arrivals import ArrivalProcess
    from aioengine_bench.client import SamplingSpec
    from aioengine_bench.datasets import DatasetName, DatasetSpec
    from aioengine_bench.http_client import RemoteSpec
    from aioengine_bench.results import SaveOptions

_DATASETS = ("random", "sharegpt", "text", "prefix_repetition", "burst", "timed_trace", "custom")
WORKLOADS = ("mixed", "shared_prefix", "single", "long")


def add_save_options(parser: argparse.ArgumentParser, *, detailed: bool = True) -> None:
    group = parser.add_argument_group("result options")
    add = group.add_argument
    add("--save-result", action="store_true", help="write the result to a JSON file")
    if detailed:
        add("--save-detailed", action="store_true", help="the saved result has every request's lengths, latencies, text and error")
    add("--append-result", action="store_true", help="add the result as a line to an existing file")
    add("--result-dir", metavar="DIR", help="save the result, in this folder (default: the current one)")
    add("--result-filename", metavar="NAME", help="save the result, under this name (default: made of label, load, model and date)")
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
    parser.set_defaults(default_num_prompts=num_prompts)
    add("--dataset-name", choices=_DATASETS, help="what to ask (default: random)")
    add("--dataset-path", metavar="FILE", help="for sharegpt (JSON), timed_trace and custom (JSON lines)")
    add("--workload", choices=WORKLOADS, help="a fixed workload in place of a dataset: the same tokens for every engine")
    add("--num-prompts", type=int, metavar="N", help=f"how many requests (default: {num_prompts}; of a workload, all)")
    add("--seed", type=int, metavar="N", default=0, help="of the dataset, the arrivals and the sampling (default: 0)")
    add("--input-len", "--random-input-len", type=int, metavar="N", help="prompt tokens (default: the dataset's; random 1024)")
    add("--output-len", "--random-output-len", type=int, metavar="N", help="output tokens (default: the dataset's; random 128)")
    add("--random-range-ratio", type=float, metavar="X", help="lengths vary by up to this share, both ways (default: 0)")
    add("--random-prefix-len", type=int, metavar="N", help="tokens that all prompts begin with, on top (default: 0)")
    add("--prefix-repetition-prefix-len", type=int, metavar="N", help="tokens of each repeated prefix (default: 256)")
    add("--prefix-repetition-suffix-len", type=int, metavar="N", help="tokens of one's own (default: 256)")
    add("--prefix-repetition-num-prefixes", type=int, metavar="N", help="different prefixes (default: 10)")
    add("--prefix-repetition-output-len", type=int, metavar="N", help="output tokens (default: 128)")
    add("--burst-size", type=int, metavar="N", help="requests that come at once (default: 16)")
    add("--burst-interval", type=float, metavar="S", help="seconds between bursts (default: 4)")
    add("--ignore-eos", action="store_true", default=None, help="go on after end-of-sequence (default: where lengths are made up)")


# Which of the options above mean something to which dataset; `seed`, `num_prompts` and `ignore_eos` do to all.
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
    from aioengine.errors import ConfigError
    from aioengine_bench.datasets import DatasetSpec
    from aioengine_bench.workloads import load_workload

    if args.workload is not None and args.dataset_name is not None:
        raise ConfigError(f"--workload {args.workload} takes the place of a dataset: leave out --dataset-name {args.dataset_name}")
    name: DatasetName = args.dataset_name or "random"
    used, what = (_USED[name], f"the dataset {name!r}") if args.workload is None else (_USED["workload"], f"--workload {args.workload}")
    refuse_unused(args, [option for option in _DATASET_OPTIONS if option not in used], f"has no effect on {what}")
    num_prompts = args.default_num_prompts if args.num_prompts is None else args.num_prompts
    if args.workload is not None:
        most = len(load_workload(args.workload).requests)
        num_prompts = most if args.num_prompts is None else args.num_prompts
        if num_prompts > most:
            raise ConfigError(f"--num-prompts is {num_prompts}, but the workload {args.workload} has {most} requests")
    repeats = name == "prefix_repetition"
    return DatasetSpec(
        name=name,
        workload=args.workload,
        path=args.dataset_path,
        num_prompts=num_prompts,
        seed=args.seed,
        input_len=_one_of(args, "input_len", "prefix_repetition_suffix_len", 256 if repeats else None),
        output_len=_one_of(args, "output_len", "prefix_repetition_output_len", 128 if repeats else None),
        range_ratio=_given(args.random_range_ratio, 0.0),
        prefix_len=_given(args.prefix_repetition_prefix_len, 256) if repeats else _given(args.random_prefix_len, 0),
        num_prefixes=_given(args.prefix_repetition_num_prefixes, 10),
        burst_size=_given(args.burst_size, 16),
        burst_interval=_given(args.burst_interval, 4.0),
        ignore_eos=args.ignore_eos,
    )


def refuse_unused(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise ConfigError if one of these options, whose default is None, was given: no option does nothing in silence."""
    from aioengine.errors import ConfigError

    for name in names:
        if getattr(args, name) not in (None, []):
            raise ConfigError(f"--{name.replace('_', '-')} {why}")


def _given(value: Any, default: Any) -> Any:
    """Zero is a value."""
    return default if value is None else value


def _one_of(args: argparse.Namespace, name: str, other: str, default: int | None) -> int | None:
    """The value of two options that mean the same."""
    from aioengine.errors import ConfigError

    first, second = getattr(args, name), getattr(args, other)
    if first is not None and second is not None:
        raise ConfigError(f"--{name.replace('_', '-')} and --{other.replace('_', '-')} say the same thing twice: give one of them")
    value: int | None = _given(_given(first, second), default)
    return value


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
    add("--burstiness", type=float, metavar="X", help="1 is Poisson, less is burstier, inf is even (default: 1)")
    add("--max-concurrency", type=int, metavar="N", help="requests out at once; the others wait in the client (default: no limit)")
    add("--ramp-up-strategy", choices=("linear", "exponential"), help="let the rate grow over the run, in place of --request-rate")
    add("--ramp-up-start-rps", type=float, metavar="X", help="requests a second at the start of the ramp")
    add("--ramp-up-end-rps", type=float, metavar="X", help="requests a second at its end")


def arrival_process(args: argparse.Namespace) -> ArrivalProcess:
    """Raises ConfigError."""
    from aioengine.errors import ConfigError
    from aioengine_bench.arrivals import ArrivalProcess, RampUp

    ends = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    ramp = None
    if args.ramp_up_strategy is None:
        if ends != (None, None):
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need a --ramp-up-strategy")
        if args.burstiness is not None and math.isinf(args.request_rate) and not _chooses_rates(args):
            raise ConfigError(f"--burstiness {args.burstiness:g} has no effect where all requests are sent at once: give a rate")
    elif None in ends:
        raise ConfigError("a ramp-up needs --ramp-up-start-rps and --ramp-up-end-rps")
    else:
        ramp = RampUp(args.ramp_up_strategy, *ends)
    return ArrivalProcess(request_rate=args.request_rate, burstiness=_given(args.burstiness, 1.0), ramp_up=ramp)


def _chooses_rates(args: argparse.Namespace) -> bool:
    """Of a sweep: it sends at rates other than --request-rate."""
    return bool(getattr(args, "request_rates", None)) or getattr(args, "find_saturation", False)


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


def add_remote_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server options")
    add = group.add_argument
    add("--base-url", metavar="URL", help="measure a server behind OpenAI's API, not an engine in this process; its key: OPENAI_API_KEY")
    add("--backend", choices=("openai", "openai-chat"), help="completions or chat (default: openai)")
    add("--endpoint", metavar="PATH", help="path of the requests (default: the backend's, such as /v1/completions)")
    add("--served-model-name", metavar="NAME", help="the model's name there (default: the first that it lists)")
    add("--send-text", action="store_true", default=None, help="send completions' prompts as text (default: as token ids)")


_REMOTE_OPTIONS = ("backend", "endpoint", "served_model_name", "send_text")
_KEPT_ENGINE_OPTIONS = ("engine_tokenizer",)


def remote_spec(args: argparse.Namespace) -> RemoteSpec | None:
    """The server to measure; None: none. Raises ConfigError for options that would do nothing."""
    from aioengine.errors import ConfigError
    from aioengine_bench.http_client import RemoteSpec

    if not hasattr(args, "base_url"):  # a sweep has no server
        return None
    if args.base_url is None:
        refuse_unused(args, _REMOTE_OPTIONS, "needs --base-url")
        return None
    for name in vars(args):
        if name.startswith("engine_") and name not in _KEPT_ENGINE_OPTIONS:
            flag = name.removeprefix("engine_").replace("_", "-")
            raise ConfigError(f"--{flag} is a setting of an engine in this process: it has no effect on the server at --base-url")
    refuse_unused(args, ("record", "events"), "shows an engine in this process: it has no effect with --base-url")
    if args.send_text and args.backend == "openai-chat":
        raise ConfigError("--send-text has no effect on --backend openai-chat, which always sends text")
    return RemoteSpec(
        base_url=args.base_url,
        backend=args.backend or "openai",
        endpoint=args.endpoint or "",
        model=args.served_model_name or "",
        send_text=bool(args.send_text),
    )
