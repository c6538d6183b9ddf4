"""`aioengine bench compare`: the same work through several engines, in turn, in one run.

All engines are loaded before the first turn and sleep between theirs; the turns go A B A B, so that whatever else
changes on the machine meets all of them. Each turn has other prompts of the same lengths, which no prefix cache knows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from aioengine.errors import AioEngineError, ConfigError
from aioengine_bench import console, svg
from aioengine_bench.compare_table import OWN, comparison_table, load_note, mark_best, print_table, without_folders
from aioengine_bench.files import check_writable, write_file
from aioengine_bench.metrics import median_run, percentile, summarize
from aioengine_bench.peer_process import PeerFailedError, PeerProcess, float32_folder
from aioengine_bench.peer_setup import check_checkout, set_up
from aioengine_bench.peers import PEERS, Contestant, Peer, find_contestant, find_peer, runner_path, with_all_settings
from aioengine_bench.results import check_saving, environment, file_name, save_result, timestamp, with_metadata
from aioengine_bench.serve import describe_reasons
from aioengine_bench.settings import CompareSettings
from aioengine_bench.workloads import Workload, WorkloadRequest, load_workload

_COMPARE_KEYS = (*("date", "benchmark", "workload", "model_id", "num_runs", "rows", "errors", "interrupted", "load_note", "environment"),)


def compare(settings: CompareSettings) -> None:
    """List, set up, or compare. Raises ConfigError, AioEngineError."""
    if settings.tables:
        print_table(settings.tables, markdown=settings.markdown)
    elif settings.list_engines:
        print("\n".join(_listed(peer, settings.folder) for peer in PEERS.values()))
    elif settings.setup:
        peers = [find_peer(name) for name in settings.setup]
        check_checkout(peers, settings.checkout)
        for peer in peers:
            set_up(peer, settings.folder, say=_say, checkout=settings.checkout)
    elif settings.host_cost:
        _compare_host_cost(settings)
    else:
        _compare_engines(settings)


def _listed(peer: Peer, folder: Path) -> str:
    settings = f"\n{'':<14} settings: {' '.join(one or '(none)' for one in peer.settings)}" if peer.settings != ("",) else ""
    return f"{peer.name:<14} set up: {peer.state(folder):<11} {peer.summary}{settings}"


# ---------------------------------------------------------------------------------------------------- engines
def turn_requests(workload: Workload, turn: int, *, max_requests: int | None) -> list[WorkloadRequest]:
    """The workload in turn 0, the same lengths with other tokens in later ones."""
    requests = workload.requests[:max_requests]
    if turn == 0:
        return requests
    return [WorkloadRequest([(t + 997 * turn) % 49000 + 100 for t in r.prompt_token_ids], r.max_tokens) for r in requests]


def agreement(token_ids: Sequence[list[int]], reference: Sequence[list[int]]) -> int:
    """How many requests got exactly the reference's tokens."""
    return sum(ours == theirs for ours, theirs in zip(token_ids, reference, strict=True))


def _chosen(settings: CompareSettings) -> list[Contestant]:
    folder = settings.folder
    able = [peer.name for peer in PEERS.values() if not peer.workloads or settings.workload in peer.workloads]
    names = settings.engines or [name for name in able if PEERS[name].state(folder) == "yes"]
    names = with_all_settings(names) if settings.all_settings else names
    contestants = [find_contestant(name) for name in names]
    for name in [name for name in names if list(names).count(name) > 1]:
        raise ConfigError(f"{name} is named twice")
    for peer in [contestant.peer for contestant in contestants]:
        if peer.name not in able:
            raise ConfigError(f"{peer.name} runs the workload {', '.join(peer.workloads)} alone, not {settings.workload}")
        if (state := peer.state(folder)) != "yes":
            raise ConfigError(f"{peer.name} is {_NOT_SET_UP[state]} in {folder}: run `aioengine bench compare --setup {peer.name}` first")
    return contestants


_NOT_SET_UP = {"no": "not set up", "interrupted": "half set up (it was interrupted)", "outdated": "set up from an older list of packages"}


def _runner_settings(settings: CompareSettings, workload: Workload) -> dict[str, Any]:
    folder, gguf = float32_folder(settings.model, settings.folder)
    length = max(len(request.prompt_token_ids) + request.max_tokens for request in workload.requests)
    return {
        "model": settings.model,
        "model_folder": str(folder),
        "gguf": gguf,
        "max_num_seqs": workload.max_num_seqs,
        "max_model_len": 2048,
        "request_len": length,
        "max_num_batched_tokens": 2048,
        "num_threads": os.cpu_count() or 1,
    }


class Comparison:
    """Engines that are running, and what each has shown so far."""

    def __init__(self, processes: Sequence[PeerProcess], options: Mapping[str, Mapping[str, str | int]]) -> None:
        self.processes = list(processes)
        self._options = options  # by process name
        self.turns: dict[str, list[dict[str, Any]]] = {process.name: [] for process in processes}
        self.token_ids: dict[str, list[list[int]]] = {}
        self.errors: dict[str, str] = {}

    def start(self, settings: dict[str, Any], warm_up: Sequence[WorkloadRequest]) -> None:
        """Load every engine, and let each answer some short requests. One that fails is left out and named."""
        for process in list(self.processes):
            with self._noting_failure(process):
                process.start({**settings, "options": dict(self._options[process.name])})
                process.run(warm_up)
                _say(f"{process.name} {process.facts['version']} is ready after {process.facts['startup_s']:.1f} s")

    def turn(self, requests: Sequence[WorkloadRequest], *, keep_tokens: bool) -> None:
        for process in list(self.processes):
            with self._noting_failure(process):
                wall_s, records, token_ids = process.run(requests)
                figures = summarize(records, duration=wall_s, percentiles=(50, 99))
                self.turns[process.name].append({"wall_s": wall_s, **figures})
                if keep_tokens and token_ids is not None:
                    self.token_ids[process.name] = token_ids
                _say(f"turn {len(self.turns[process.name])}, {process.name}: {console.number(figures['output_throughput'], 1)} tok/s")
                if figures["failed"]:
                    _say(f"  {figures['failed']} requests lost: {describe_reasons(figures['failure_reasons'])}")

    def _noting_failure(self, process: PeerProcess) -> _NoteFailure:
        return _NoteFailure(self, process)


@dataclass(slots=True)
class _NoteFailure:
    comparison: Comparison
    process: PeerProcess

    def __enter__(self) -> None:
        """Nothing to do before."""

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> bool:
        if not isinstance(exc, PeerFailedError):
            return False
        self.comparison.errors[self.process.name] = str(exc)
        self.comparison.processes.remove(self.process)
        return True


def _say(text: str) -> None:
    """A comparison takes minutes: one line for each thing that is done, also where there is no terminal."""
    print(text, file=sys.stderr, flush=True)


def _compare_engines(settings: CompareSettings) -> None:
    date = timestamp()
    default_name = file_name(["compare", settings.workload], date)
    _check_saving(settings, _COMPARE_KEYS, default_name)
    workload = load_workload(settings.workload)
    contestants = _chosen(settings)
    names = [contestant.name for contestant in contestants]
    if settings.reference is not None and settings.reference not in names:
        raise ConfigError(f"the reference {settings.reference!r} is not among the engines {', '.join(names)}")
    interrupted = False
    before = environment()  # the engines themselves are the load later on
    note = load_note(before["load_average"], before["num_cpus"])
    with ExitStack() as stack:
        processes = [stack.enter_context(PeerProcess(contestant.name, _command(contestant, settings))) for contestant in contestants]
        comparison = Comparison(processes, {contestant.name: contestant.options for contestant in contestants})
        everyone = list(comparison.processes)
        warm_up = [WorkloadRequest(r.prompt_token_ids[::-1], min(4, r.max_tokens)) for r in workload.requests[:8]]
        try:
            comparison.start(_runner_settings(settings, workload), warm_up)
            for turn in range(settings.num_runs):
                comparison.turn(turn_requests(workload, turn, max_requests=settings.max_requests), keep_tokens=turn == 0)
        except KeyboardInterrupt:
            interrupted = True
        rows = [_row(process, comparison, settings) for process in everyone if comparison.turns[process.name]]
    mark_best(rows)
    result = {
        "date": date,
        "benchmark": "compare",
        "workload": settings.workload,
        "model_id": settings.model,
        "num_runs": settings.num_runs,
        "rows": rows,
        "errors": comparison.errors,
        "interrupted": interrupted,
        "load_note": note,
        "environment": environment(),
    }
    _report(settings, result, default_name)
    if interrupted:
        raise KeyboardInterrupt
    if not rows:
        raise AioEngineError("no engine finished a turn")


def _check_saving(settings: CompareSettings, keys: Sequence[str], default_name: str) -> None:
    """Raise ConfigError now for what would fail after the last turn."""
    check_saving(settings.save, keys, default_name=default_name)
    if settings.picture is not None:
        check_writable(Path(settings.picture))


def _command(contestant: Contestant, settings: CompareSettings) -> list[str]:
    return [str(contestant.peer.python(settings.folder)), str(runner_path(contestant.peer.runner))]


def _row(process: PeerProcess, comparison: Comparison, settings: CompareSettings) -> dict[str, Any]:
    turns = comparison.turns[process.name]
    figures = median_run(turns, "wall_s")
    throughputs = [turn["output_throughput"] for turn in turns if turn["output_throughput"] is not None]
    reference = settings.reference or _default_reference(comparison)
    known = comparison.token_ids.get(reference or ""), comparison.token_ids.get(process.name)
    return {
        "engine": process.name,
        "version": process.facts["version"],
        "precision": process.facts["precision"],
        "output_throughput": figures["output_throughput"],
        "least_output_throughput": percentile(throughputs, 0),
        "most_output_throughput": percentile(throughputs, 100),
        "p50_ttft_ms": figures["p50_ttft_ms"],
        "p99_ttft_ms": figures["p99_ttft_ms"],
        "p50_itl_ms": figures["p50_itl_ms"],
        "p99_itl_ms": figures["p99_itl_ms"],
        "startup_s": process.facts["startup_s"],
        "peak_rss_mb": process.peak_rss_mb,
        "failed": sum(turn["failed"] for turn in turns),
        "failure_reasons": _all_reasons(turns),
        "unseen_tokens": process.num_unseen_tokens,
        "agreement": agreement(known[1], known[0]) if known[0] is not None and known[1] is not None else None,
        "agreement_of": len(known[1]) if known[1] is not None else None,
        "reference": reference,
        "note": process.facts["note"],
        "turns": turns,
    }


def _all_reasons(turns: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for turn in turns:
        for reason, count in turn["failure_reasons"].items():
            counts[reason] = counts.get(reason, 0) + count
    return counts


# Those that compute in float32 on float32 weights, and ours if none does.
_REFERENCES = ("vllm", "vllm:dtype=float32", "transformers", "openvino", "openvino:weight_format=fp32", "aioengine:weights=exact", OWN)


def _default_reference(comparison: Comparison) -> str | None:
    return next((name for name in _REFERENCES if name in comparison.token_ids), None)


def _report(settings: CompareSettings, result: dict[str, Any], default_name: str) -> None:
    out = console.output_stream(stdout_is_taken=settings.save.claims_stdout)
    print(comparison_table(result["rows"], markdown=settings.markdown), file=out)
    if result["rows"] and result["rows"][0]["reference"]:
        print(f"\nSame tokens: requests whose greedy tokens are those of {result['rows'][0]['reference']}.", file=out)
    if result["load_note"] is not None:
        print(f"\nNote: {result['load_note']}.", file=out)
    for row in result["rows"]:
        if row["failed"]:
            reasons = describe_reasons(row["failure_reasons"])
            print(f"{without_folders(row['engine'])} lost {row['failed']} requests: {reasons}", file=sys.stderr)
    for name, error in result["errors"].items():
        print(f"{name} failed: {error}", file=sys.stderr)
    bars = [(without_folders(row["engine"]), row["output_throughput"]) for row in result["rows"] if row["output_throughput"] is not None]
    _finish(
        settings, result, default_name, svg.bar_chart(f"Output tokens a second, {result['workload']}", bars, x_label="higher is better")
    )


def _finish(settings: CompareSettings, result: dict[str, Any], default_name: str, picture: str) -> None:
    out = console.output_stream(stdout_is_taken=settings.save.claims_stdout)
    if settings.picture is not None:
        write_file(Path(settings.picture), svg.standalone(picture).encode())
        print(f"Picture in {settings.picture}", file=out)
    path = save_result(with_metadata(result, settings.save.metadata), settings.save, default_name=default_name)
    if path is not None:
        print(f"Saved to {path}", file=out)


# ---------------------------------------------------------------------------------------------------- host cost
def _compare_host_cost(settings: CompareSettings) -> None:
    """Our scheduler and vLLM's, each in its own process, a size at a time: A B A B."""
    date = timestamp()
    _check_saving(settings, ("date", "benchmark", "rows", "num_runs", "environment"), file_name(["host-cost"], date))
    vllm = find_peer("vllm")
    commands = {"aioengine": [sys.executable, "-m", "aioengine_bench.host_cost"]}
    if vllm.state(settings.folder) == "yes":
        folder, _ = float32_folder(settings.model, settings.folder)
        script = str(runner_path("vllm_host_cost.py"))
        commands["vllm"] = [str(vllm.python(settings.folder)), script, "--model", str(folder)]
    measured: list[dict[str, Any]] = []
    for _ in range(settings.num_runs):
        for num_reqs in settings.num_reqs:
            arguments = [str(num_reqs), "--num-steps", str(settings.num_steps)]
            measured += [_measure([*command, *arguments]) for command in commands.values()]
    rows = host_cost_rows(measured)
    out = console.output_stream(stdout_is_taken=settings.save.claims_stdout)
    columns = ["engine", "requests", "schedule us", "update us", "both us", "us/request", "of vLLM's"]
    lines = [
        [
            row["engine"],
            str(row["num_reqs"]),
            *(console.number(row[key], 1) for key in ("schedule_min_us", "update_min_us", "min_us")),
            console.number(row["us_per_request"], 2),
            "-" if row["share_of_vllm"] is None else f"{row['share_of_vllm']:.0%}",
        ]
        for row in rows
    ]
    print((console.markdown_table if settings.markdown else console.table)(columns, lines), file=out)
    if "vllm" not in commands:
        print(f"\nvLLM is not set up in {settings.folder}: run `aioengine bench compare --setup vllm` to have it beside.", file=out)
    result = {"date": date, "benchmark": "host-cost", "rows": rows, "num_runs": settings.num_runs, "environment": environment()}
    engines = list(commands)
    series = [svg.Series(name, [(r["num_reqs"], r["min_us"]) for r in rows if r["engine"] == name]) for name in engines]
    picture = svg.line_chart("schedule() + update_from_output()", series, x_label="running requests", y_label="microseconds a step")
    _finish(settings, result, file_name(["host-cost"], date), picture)


def host_cost_rows(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The least of the turns for each engine and size: other jobs only ever add time."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for one in measured:
        row = rows.setdefault((one["num_reqs"], one["engine"]), {"engine": one["engine"], "num_reqs": one["num_reqs"]})
        for key in ("schedule_min_us", "update_min_us", "schedule_median_us", "update_median_us"):
            row[key] = min(one[key], row.get(key, one[key]))
    for (num_reqs, _), row in rows.items():
        row["min_us"] = row["schedule_min_us"] + row["update_min_us"]
        row["us_per_request"] = row["min_us"] / num_reqs
    for (num_reqs, _), row in rows.items():
        vllm = rows.get((num_reqs, "vllm"))
        row["share_of_vllm"] = row["min_us"] / vllm["min_us"] if vllm is not None else None
    return [row for _, row in sorted(rows.items(), key=lambda item: item[0])]


def _measure(command: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(b"{")]
    if done.returncode or not lines:
        raise AioEngineError(
            f"{' '.join(command[:3])} ... failed with status {done.returncode}:\n{done.stderr.decode(errors='replace')[-2000:]}"
        )
    value: dict[str, Any] = orjson.loads(lines[-1])
    return value
