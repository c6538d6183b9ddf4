"""The command line of `aioengine bench`: its subcommands. Flags are named as in `vllm bench`.

The options are the fields of the settings. Imports nothing heavy: the help must answer at once. What a subcommand does is
imported when it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aioengine.errors import ConfigError
from aioengine_bench.flags import (
    add_dataset_options,
    add_load_options,
    add_metric_options,
    add_remote_options,
    add_sampling_options,
    add_save_options,
    arrival_process,
    dataset_spec,
    remote_spec,
    sampling_spec,
)
from aioengine_bench.options import add_options, given, refuse_unused
from aioengine_bench.rate_search import SearchSettings
from aioengine_bench.settings import (
    CompareSettings,
    DiffSettings,
    KernelSettings,
    LatencySettings,
    OverheadSettings,
    ReportSettings,
    ServeSettings,
    SweepSettings,
    ThroughputSettings,
)
from aioengine_bench.simulate.settings import SimulateSettings
from aioengine_bench.specs import LOAD, SaveOptions

if TYPE_CHECKING:
    from aioengine_bench.host import Host

EPILOG = """\
examples:
  aioengine bench throughput --workload mixed --num-runs 3
  aioengine bench latency --input-len 32 --output-len 128 --batch-size 8
  aioengine bench serve --dataset-name text --request-rate 2 --num-prompts 100 --goodput ttft:500 tpot:80 --save-result
  aioengine bench sweep --request-rates 0.5,1,2,4 --num-runs 3 --result-dir results
  aioengine bench overhead                             the engine's own cost, no model
  aioengine bench report results/*.json -o report.html

`aioengine bench COMMAND --help` describes a command and its options. Names and JSON keys are those of `vllm bench`.
"""


def add_subcommands(parser: Any, host: Host) -> None:
    """Give `parser` (of `aioengine bench`) its subcommands; each sets `handler(args, start_time)`."""
    commands = parser.add_subparsers(title="commands", dest="bench_command", metavar="COMMAND", required=True, prog="aioengine bench")
    measure = (_add_throughput, _add_latency, _add_serve, _add_sweep, _add_overhead, _add_kernels, _add_compare)
    for add in (*measure, _add_simulate, _add_diff, _add_report):
        add(commands, host)


def _command(commands: Any, name: str, summary: str, examples: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        usage=f"aioengine bench {name} [options]",
        epilog="examples:\n" + examples,
    )
    return command


def _add_throughput(commands: Any, host: Host) -> None:
    parser = _command(
        commands,
        "throughput",
        "time everything at once, offline",
        """\
  aioengine bench throughput --workload mixed --num-runs 3
  aioengine bench throughput --input-len 128 --output-len 64 --num-prompts 32 --output-json -
""",
    )
    add_options(parser, ThroughputSettings)
    add_dataset_options(parser, num_prompts=64)
    add_sampling_options(parser)
    add_save_options(parser)
    host.add_engine_options(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.settings import ThroughputSettings
        from aioengine_bench.throughput import throughput

        settings = ThroughputSettings(
            **given(args, ThroughputSettings),
            config=host.engine_config(args),
            dataset=dataset_spec(args),
            sampling=sampling_spec(args),
            save=save_options(args),
            publish=host.publish_options(args),
        )
        host.run(throughput(settings, host))

    parser.set_defaults(handler=handle)


def _add_latency(commands: Any, host: Host) -> None:
    parser = _command(
        commands,
        "latency",
        "time one batch, again and again",
        "  aioengine bench latency --input-len 32 --output-len 128 --batch-size 8 --num-iters 10\n",
    )
    add_options(parser, LatencySettings)
    add_sampling_options(parser)
    add_save_options(parser, detailed=False)
    host.add_engine_options(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        vars(args).setdefault("engine_enable_prefix_caching", False)  # the same prompts come every time
        from aioengine_bench.latency import latency

        settings = LatencySettings(
            **given(args, LatencySettings),
            config=host.engine_config(args),
            sampling=sampling_spec(args),
            save=save_options(args),
            publish=host.publish_options(args),
        )
        host.run(latency(settings, host))

    parser.set_defaults(handler=handle)


def _add_serve(commands: Any, host: Host) -> None:
    parser = _command(
        commands,
        "serve",
        "online load on one engine, by rate, ramp or concurrency",
        """\
  aioengine bench serve --dataset-name text --request-rate 2 --num-prompts 100
  aioengine bench serve --max-concurrency 8 --num-prompts 64 --input-len 128 --goodput ttft:500 tpot:80
  aioengine bench serve --dataset-name burst --burst-size 8 --burst-interval 5 --save-result --save-detailed
  aioengine bench serve --goal "ttft_p99<=500,tpot_p50<=40" --num-prompts 100     the highest rate that keeps them
  aioengine bench serve --base-url http://127.0.0.1:8000 --workload mixed      a server, with the tokenizer of --model
""",
    )
    add_remote_options(parser)
    add_options(parser, ServeSettings)
    add_load_options(parser)
    add_options(parser, SearchSettings, group=LOAD)
    add_metric_options(parser)
    add_dataset_options(parser, num_prompts=1000)
    add_sampling_options(parser)
    add_save_options(parser)
    host.add_engine_options(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.serve import serve

        settings, search_options = serve_settings(args, host), given(args, SearchSettings)
        if not search_options:
            host.run(serve(settings, host))
            return
        from aioengine_bench.search import search

        host.run(search(SearchSettings(**search_options, base=settings), host))

    parser.set_defaults(handler=handle)


def serve_settings(args: argparse.Namespace, host: Host) -> ServeSettings:
    """`ServeSettings` of the options. Raises ConfigError."""
    return ServeSettings(
        **given(args, ServeSettings),
        config=host.engine_config(args),
        dataset=dataset_spec(args),
        arrivals=arrival_process(args),
        sampling=sampling_spec(args),
        save=save_options(args),
        remote=remote_spec(args),
        publish=host.publish_options(args),
    )


def save_options(args: argparse.Namespace) -> SaveOptions:
    """`SaveOptions` of the command line. Raises ConfigError."""
    return SaveOptions(**given(args, SaveOptions))


def _add_sweep(commands: Any, host: Host) -> None:
    parser = _command(
        commands,
        "sweep",
        "serve at many loads and settings, with repeats, and find the saturation",
        """\
  aioengine bench sweep --request-rates 0.5,1,2,4 --num-runs 3 --result-dir results
  aioengine bench sweep --find-saturation --dataset-name text --num-prompts 50 --result-dir results
  aioengine bench sweep --max-concurrencies 1,4,16 --serve-params '[{"max_num_seqs": 8}, {"max_num_seqs": 32}]' --dry-run
""",
    )
    add_options(parser, SweepSettings)
    warm_ups = "requests before each combination of settings and load, not counted"
    add_options(parser, ServeSettings, texts={"num_warmups": warm_ups}, leave_out=("requests_jsonl",))
    add_load_options(parser)
    add_metric_options(parser)
    add_dataset_options(parser, num_prompts=100)
    add_sampling_options(parser)
    add_save_options(parser)
    host.add_engine_options(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.settings import SweepSettings
        from aioengine_bench.sweep import sweep

        settings = SweepSettings(**given(args, SweepSettings), base=serve_settings(args, host))
        host.run(sweep(settings, host))

    parser.set_defaults(handler=handle)


def _add_overhead(commands: Any, host: Host) -> None:
    parser = _command(
        commands,
        "overhead",
        "the engine's own cost a step, with no model behind it",
        "  aioengine bench overhead\n  aioengine bench overhead --num-reqs 1,64 --num-steps 50 --save-result\n",
    )
    add_options(parser, OverheadSettings)
    add_save_options(parser, detailed=False)
    host.add_log_option(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.overhead import overhead

        settings = OverheadSettings(**given(args, OverheadSettings), save=save_options(args))
        host.run(overhead(settings))

    parser.set_defaults(handler=handle)


def _add_simulate(commands: Any, host: Host) -> None:
    parser = _command(
        commands,
        "simulate",
        "the real scheduler on a virtual clock: other traffic, other settings, other machines, no model",
        """\
  aioengine bench simulate --trace AzureLLMInferenceTrace_conv.csv --roofline llama-3-8b,h100 --max-num-batched-tokens 8192
  aioengine bench simulate --from-recording prod.jsonl --set max_num_batched_tokens=1024
  aioengine bench simulate --trace conversation_trace.jsonl --replicas 4 --routing prefix_aware
  aioengine bench simulate --from-recording prod.jsonl --goal "ttft_p99<=500,tpot_p50<=40" --vary max_num_seqs=16:256
  aioengine bench simulate --from-recording prod.jsonl --record sim.jsonl      then: aioengine top sim.jsonl
""",
    )
    add_options(parser, SimulateSettings)
    add_load_options(parser)
    add_metric_options(parser)
    add_dataset_options(parser, num_prompts=100)
    add_save_options(parser)
    host.add_engine_options(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.simulate.command import run_simulate

        publish = host.publish_options(args)
        if publish.events is not None:
            raise ConfigError("--events is for an engine that runs: --record writes what aioengine top plays")
        settings = SimulateSettings(**given(args, SimulateSettings), record=None if publish.record is None else str(publish.record))
        serve = ServeSettings(
            **given(args, ServeSettings),
            config=host.engine_config(args),
            dataset=dataset_spec(args),
            arrivals=arrival_process(args),
            save=save_options(args),
        )
        run_simulate(settings, serve)

    parser.set_defaults(handler=handle)


def _add_kernels(commands: Any, host: Host) -> None:
    parser = _command(
        commands,
        "kernels",
        "every op against its reference and its roofline on this device",
        """\
  aioengine bench kernels
  aioengine bench kernels --op rms_norm --op silu_mul --num-tokens 1,32,512
  aioengine bench kernels --roofline                   GOPS and GB/s of the native products, and their share of the peak
  aioengine bench kernels --compile-report             registers and spills of the Triton kernels; needs no GPU
""",
    )
    add_options(parser, KernelSettings)
    add_save_options(parser, detailed=False)
    host.add_log_option(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.kernels import kernels

        if args.compile_report:
            refuse_unused(args, ("op", "num_tokens", "min_time", "device", "threads", "roofline"), "has no effect on --compile-report")
        elif args.roofline:
            refuse_unused(args, ("op", "device", "target"), "has no effect on --roofline")
        else:
            refuse_unused(args, ("target",), "needs --compile-report")
        kernels(KernelSettings(**given(args, KernelSettings), save=save_options(args)))

    parser.set_defaults(handler=handle)


def _add_compare(commands: Any, host: Host) -> None:
    parser = _command(
        commands,
        "compare",
        "the same work through other engines, in turn, in one run",
        """\
  aioengine bench compare --setup vllm llama.cpp       make their environments, once; a look at what is needed: --list
  aioengine bench compare --engines aioengine vllm llama.cpp --workload mixed --num-runs 3
  aioengine bench compare --engines aioengine:weights=fast openvino:weight_format=int8 openvino:weight_format=int4
  aioengine bench compare --engines aioengine llama.cpp llama.cpp:gguf=/path/to/the-same-model.Q4_0.gguf
  aioengine bench compare --all-settings --workload mixed --output-json mixed.json       every engine at all its settings
  aioengine bench compare --table mixed.json long.json --markdown       one table of several results
  aioengine bench compare --setup ik_llama.cpp --checkout ~/src/ik_llama.cpp
  aioengine bench compare --host-cost                  the scheduler alone, beside vLLM's
""",
    )
    add_options(parser, CompareSettings)
    host.add_model_option(parser)
    add_save_options(parser, detailed=False)
    host.add_log_option(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.compare import compare

        running = ("engines", "workload", "max_requests", "reference", "all_settings", "num_runs", "picture")
        if args.host_cost:
            refuse_unused(args, [name for name in running if name not in ("num_runs", "picture")], "has no effect on --host-cost")
        else:
            refuse_unused(args, ("num_reqs", "num_steps"), "needs --host-cost")
        if args.setup is None:
            refuse_unused(args, ("checkout",), "needs --setup")
        if args.table is not None:
            refuse_unused(args, (*running, "setup", "list", "host_cost"), "has no effect on --table")
        compare(CompareSettings(**given(args, CompareSettings), model=args.model, save=save_options(args)))

    parser.set_defaults(handler=handle)


def _add_report(commands: Any, host: Host) -> None:
    parser: argparse.ArgumentParser = _command(
        commands,
        "report",
        "one self-contained HTML page with plots, from result files and recordings",
        "  aioengine bench report results/*.json steps.jsonl -o report.html\n",
    )
    parser.usage = "aioengine bench report [options] FILE..."
    parser.add_argument("files", metavar="FILE", nargs="+", help="results of --save-result, or a recording of --record")
    add_options(parser, ReportSettings)
    host.add_log_option(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.report import report

        report(ReportSettings(**given(args, ReportSettings), inputs=_files(args.files)))

    parser.set_defaults(handler=handle)


def _add_diff(commands: Any, host: Host) -> None:
    parser: argparse.ArgumentParser = _command(
        commands,
        "diff",
        "two result files beside each other, with an exit status for regressions",
        """\
  aioengine bench diff before.json after.json
  aioengine bench diff before.json after.json --fail-if 'output_throughput<-5%' --fail-if 'p99_ttft_ms>+20'
""",
    )
    parser.usage = "aioengine bench diff [options] BEFORE AFTER"
    parser.add_argument("before", metavar="BEFORE", help="a result of --save-result")
    parser.add_argument("after", metavar="AFTER", help="another one, of the same work")
    add_options(parser, DiffSettings)
    host.add_log_option(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.diff import diff

        diff(DiffSettings(**given(args, DiffSettings), before=args.before, after=args.after))

    parser.set_defaults(handler=handle)


def _files(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))  # a file that two patterns match counts once
