"""The command line of `aioengine bench`: its subcommands. Flags are named as in `vllm bench`.

Imports nothing heavy: the help must answer at once. What a subcommand does is imported when it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aioengine_bench.flags import (
    WORKLOADS,
    add_dataset_options,
    add_load_options,
    add_metric_options,
    add_remote_options,
    add_sampling_options,
    add_save_options,
    arrival_process,
    dataset_spec,
    numbers,
    refuse_unused,
    remote_spec,
    sampling_spec,
    save_options,
)

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
    for add in (_add_throughput, _add_latency, _add_serve, _add_sweep, _add_overhead, _add_kernels, _add_compare, _add_report):
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
    parser.add_argument(
        "--num-runs", type=int, metavar="N", default=1, help="runs, prefix cache reset before each; the median counts (default: 1)"
    )
    parser.add_argument("--num-warmups", type=int, metavar="N", default=1, help="requests before the first run (default: 1)")
    parser.add_argument("--stream", action="store_true", help="consume every output as it comes, not only the final ones")
    add_dataset_options(parser, num_prompts=64)
    add_sampling_options(parser)
    add_save_options(parser)
    host.add_engine_options(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.throughput import ThroughputSettings, throughput

        settings = ThroughputSettings(
            config=host.engine_config(args),
            dataset=dataset_spec(args),
            sampling=sampling_spec(args),
            save=save_options(args),
            num_warmups=args.num_warmups,
            num_runs=args.num_runs,
            stream=args.stream,
            publish=host.publish_options(args),
            disable_progress=args.disable_tqdm,
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
    add = parser.add_argument
    add("--input-len", type=int, metavar="N", default=32, help="prompt tokens (default: 32)")
    add("--output-len", type=int, metavar="N", default=128, help="output tokens (default: 128)")
    add("--batch-size", type=int, metavar="N", default=8, help="requests of the batch (default: 8)")
    add("--num-iters-warmup", type=int, metavar="N", default=10, help="batches that do not count (default: 10)")
    add("--num-iters", type=int, metavar="N", default=30, help="batches that do (default: 30)")
    add("--seed", type=int, metavar="N", default=0, help="of the prompts and the sampling (default: 0)")
    add_sampling_options(parser)
    add_save_options(parser, detailed=False)
    host.add_engine_options(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        vars(args).setdefault("engine_enable_prefix_caching", False)  # the same prompts come every time
        from aioengine_bench.latency import LatencySettings, latency

        settings = LatencySettings(
            config=host.engine_config(args),
            sampling=sampling_spec(args),
            save=save_options(args),
            input_len=args.input_len,
            output_len=args.output_len,
            batch_size=args.batch_size,
            num_iters_warmup=args.num_iters_warmup,
            num_iters=args.num_iters,
            seed=args.seed,
            publish=host.publish_options(args),
            disable_progress=args.disable_tqdm,
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
  aioengine bench serve --base-url http://127.0.0.1:8000 --workload mixed      a server, with the tokenizer of --model
""",
    )
    add_remote_options(parser)
    parser.add_argument("--num-warmups", type=int, metavar="N", default=1, help="requests before the load, not counted (default: 1)")
    parser.add_argument("--request-id-prefix", metavar="TEXT", default="bench-", help="of the request ids (default: bench-)")
    add_load_options(parser)
    add_metric_options(parser)
    add_dataset_options(parser, num_prompts=1000)
    add_sampling_options(parser)
    add_save_options(parser)
    host.add_engine_options(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.serve import serve

        host.run(serve(serve_settings(args, host), host))

    parser.set_defaults(handler=handle)


def serve_settings(args: argparse.Namespace, host: Host) -> Any:
    """`ServeSettings` of the flags. Raises ConfigError."""
    from aioengine_bench.metrics import METRICS
    from aioengine_bench.serve import ServeSettings, parse_goodput, parse_list, parse_percentiles

    return ServeSettings(
        config=host.engine_config(args),
        dataset=dataset_spec(args),
        arrivals=arrival_process(args),
        sampling=sampling_spec(args),
        save=save_options(args),
        max_concurrency=args.max_concurrency,
        num_warmups=args.num_warmups,
        remote=remote_spec(args),
        metrics=parse_list(args.percentile_metrics, allowed=METRICS),
        percentiles=parse_percentiles(args.metric_percentiles),
        slo_ms=parse_goodput(args.goodput),
        publish=host.publish_options(args),
        disable_progress=args.disable_tqdm,
        request_id_prefix=args.request_id_prefix,
    )


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
    add = parser.add_argument
    add("--request-rates", type=numbers(float), metavar="X,...", default=[], help="one run a rate")
    add("--max-concurrencies", type=numbers(int), metavar="N,...", default=[], help="one run a number of requests out at once")
    add("--find-saturation", action="store_true", help="one after the other, all at once, then rates in between and just beyond")
    add("--serve-params", metavar="JSON", help="a list of engine settings (or a file with it): each combines with each load")
    add("--num-runs", type=int, metavar="N", default=3, help="repeats of each combination; the median is reported (default: 3)")
    add("--resume", action="store_true", help="leave out the runs that --result-dir has, made with the same settings, code and machine")
    add("--dry-run", action="store_true", help="only list the combinations")
    add(
        "--num-warmups",
        type=int,
        metavar="N",
        default=1,
        help="requests before each combination of settings and load, not counted (default: 1)",
    )
    add("--request-id-prefix", metavar="TEXT", default="bench-", help="of the request ids (default: bench-)")
    add_load_options(parser)
    add_metric_options(parser)
    add_dataset_options(parser, num_prompts=100)
    add_sampling_options(parser)
    add_save_options(parser)
    host.add_engine_options(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.sweep import SweepSettings, parse_serve_params, sweep

        settings = SweepSettings(
            base=serve_settings(args, host),
            request_rates=tuple(args.request_rates),
            max_concurrencies=tuple(args.max_concurrencies),
            find_saturation=args.find_saturation,
            serve_params=parse_serve_params(args.serve_params),
            num_runs=args.num_runs,
            resume=args.resume,
            dry_run=args.dry_run,
        )
        host.run(sweep(settings, host))

    parser.set_defaults(handler=handle)


def _add_overhead(commands: Any, host: Host) -> None:
    parser = _command(
        commands,
        "overhead",
        "the engine's own cost a step, with no model behind it",
        "  aioengine bench overhead\n  aioengine bench overhead --num-reqs 1,64 --num-steps 50 --save-result\n",
    )
    add = parser.add_argument
    add("--num-reqs", type=numbers(int), metavar="N,...", default=[1, 32, 256, 1024], help="running requests (default: 1,32,256,1024)")
    add("--num-steps", type=int, metavar="N", default=100, help="steps to measure in each case (default: 100)")
    add("--forward-ms", type=float, metavar="X", default=5.0, help="pretended forward of the overlap comparison (default: 5)")
    add_save_options(parser, detailed=False)
    host.add_log_option(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.overhead import OverheadSettings, overhead

        settings = OverheadSettings(
            save=save_options(args),
            num_reqs=args.num_reqs,
            num_steps=args.num_steps,
            forward_ms=args.forward_ms,
            disable_progress=args.disable_tqdm,
        )
        host.run(overhead(settings))

    parser.set_defaults(handler=handle)


def _add_kernels(commands: Any, host: Host) -> None:
    parser = _command(
        commands,
        "kernels",
        "every op against its reference and its roofline on this device",
        """\
  aioengine bench kernels
  aioengine bench kernels --op rms_norm --op silu_mul --num-tokens 1,32,512
  aioengine bench kernels --compile-report             registers and spills of the Triton kernels; needs no GPU
""",
    )
    add = parser.add_argument
    add("--op", action="append", metavar="NAME", default=[], help="only this op; may be repeated (default: all)")
    add("--num-tokens", type=numbers(int), metavar="N,...", help="rows of a step (default: 1,8,32,256)")
    add("--min-time", type=float, metavar="S", help="seconds to repeat each call for (default: 0.1)")
    add("--device", choices=("auto", "cpu", "cuda"), help="where to run (default: auto)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: all cores)")
    add("--compile-report", action="store_true", help="compile the Triton kernels ahead of time and report what came out")
    add(
        "--target", action="append", metavar="SM", default=[], help="for --compile-report: sm_80, sm_86 or sm_90 (default: sm_80 and sm_90)"
    )
    add_save_options(parser, detailed=False)
    host.add_log_option(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.kernels import KernelSettings, kernels

        if args.compile_report:
            refuse_unused(args, ("op", "num_tokens", "min_time", "device", "threads"), "has no effect on --compile-report")
        else:
            refuse_unused(args, ("target",), "needs --compile-report")
        measured = {"num_tokens": args.num_tokens, "min_time": args.min_time, "device": args.device}
        settings = KernelSettings(
            save=save_options(args),
            ops=tuple(args.op),
            **{name: value for name, value in measured.items() if value is not None},
            threads=args.threads,
            compile_report=args.compile_report,
            targets=tuple(args.target),
        )
        kernels(settings)

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
  aioengine bench compare --host-cost                  the scheduler alone, beside vLLM's
""",
    )
    add = parser.add_argument
    add(
        "--engines",
        nargs="+",
        metavar="NAME",
        default=[],
        help="which, NAME or NAME:OPTION=VALUE,... (default: aioengine and all that are set up)",
    )
    add("--list", action="store_true", help="name the engines, what each needs, and which are set up")
    add("--setup", nargs="+", metavar="NAME", default=[], help="make the environments of these engines, each its own")
    add("--peers-dir", metavar="DIR", help="where the environments are (default: peers in aioengine's cache folder)")
    add("--workload", choices=WORKLOADS, help="the work (default: mixed)")
    add("--num-runs", type=int, metavar="N", default=3, help="turns of each engine: A B A B ... (default: 3)")
    add("--max-requests", type=int, metavar="N", help="only the first N requests of the workload (default: all)")
    add("--reference", metavar="NAME", help="the engine whose greedy tokens the others are held against (default: the first in float32)")
    add("--markdown", action="store_true", help="print the table as Markdown")
    add("--picture", metavar="FILE", help="write the picture as SVG")
    add("--host-cost", action="store_true", help="measure schedule() and update_from_output() beside vLLM's scheduler instead")
    add("--num-reqs", type=numbers(int), metavar="N,...", help="for --host-cost (default: 32,256,1024)")
    add("--num-steps", type=int, metavar="N", help="for --host-cost: steps measured a turn (default: 200)")
    host.add_model_option(parser)
    add_save_options(parser, detailed=False)
    host.add_log_option(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.compare import CompareSettings, compare

        if args.host_cost:
            refuse_unused(args, ("engines", "workload", "max_requests", "reference"), "has no effect on --host-cost")
        else:
            refuse_unused(args, ("num_reqs", "num_steps"), "needs --host-cost")
        given = {"workload": args.workload, "num_reqs": args.num_reqs, "num_steps": args.num_steps}
        settings = CompareSettings(
            **{name: value for name, value in given.items() if value is not None},
            model=args.model,
            save=save_options(args),
            engines=tuple(args.engines),
            list_engines=args.list,
            setup=tuple(args.setup),
            peers_dir=args.peers_dir,
            num_runs=args.num_runs,
            max_requests=args.max_requests,
            reference=args.reference,
            markdown=args.markdown,
            picture=args.picture,
            host_cost=args.host_cost,
        )
        compare(settings)

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
    parser.add_argument("--output", "-o", metavar="FILE", default="report.html", help='the page; "-" is stdout (default: report.html)')
    parser.add_argument("--title", metavar="TEXT", default="aioengine benchmark report", help="its heading")
    host.add_log_option(parser)

    def handle(args: argparse.Namespace, start_time: float) -> None:
        from aioengine_bench.report import ReportSettings, report

        report(ReportSettings(inputs=_files(args.files), output=args.output, title=args.title))

    parser.set_defaults(handler=handle)


def _files(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))  # a file that two patterns match counts once
