"""A run as one HTML file that needs nothing else: summary, latencies, causes, graphs over time, a waterfall to go about in.

The page asks for nothing from anywhere; its policy (CSP) allows only its own script and style, by their hashes. Whatever other
people wrote (request ids, prompts, names) travels as JSON in ASCII without "<", and the script sets it as text only.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, get_args

from aioengine.printable import PROSE, printable
from aioengine_tui.model.why.advice import ADVICE_STEPS
from aioengine_tui.model.why.words import STOP_LETTERS
from aioengine_tui.runs.run_log import ADMISSION_STOPS, PieceKind, RunLog, RunRequest, Samples
from aioengine_tui.runs.summary import LATENCIES, Figure, summarize

MAX_STEPS = 20_000
"""More are thinned out: the page holds every k-th."""
MAX_REQUESTS = 4_000
MAX_PIECES = 120_000
"""Of all requests on the page together; with these limits a page is below some 10 MB."""

_KINDS: tuple[PieceKind, ...] = get_args(PieceKind)

# Column of the steps -> its name on the page.
_STEP_COLUMNS = {
    "step_id": "id", "stop": "s", "num_tokens": "n", "token_budget": "b", "num_running": "r", "num_waiting": "w", "num_preempted": "p",
    "num_used_blocks": "u", "num_cached_blocks": "c", "num_prompt_tokens": "pt", "num_recomputed_tokens": "rt", "num_new_tokens": "k",
    "num_allocated": "al", "num_freed": "fr", "num_evicted": "ev", "num_preempting": "pr",
}  # fmt: skip


def render_report(log: RunLog, *, title: str) -> str:
    """The whole page. title: other people's text too (a file's name)."""
    page = files("aioengine_tui.runs").joinpath("page")
    script, style = (page.joinpath(name).read_text(encoding="utf-8") for name in ("report.js", "report.css"))
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    parts = {
        "CSP": policy,
        "TITLE": html.escape(printable(title)),
        "STYLE": style,
        "DATA": _embedded(report_data(log)),
        "SCRIPT": script,
    }
    template = page.joinpath("report.html").read_text(encoding="utf-8").split("@")
    return "".join(parts.get(piece, piece) if index % 2 else piece for index, piece in enumerate(template))


def _hash(text: str) -> str:
    """As a policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(value: Any) -> str:
    """JSON that no HTML parser can take for an end of its script, and that any encoding can hold."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ---------------------------------------------------------------------------------------------------- the data
def report_data(log: RunLog) -> dict[str, Any]:
    """What the page shows, as plain values; its names are those of `report.js`. Times are milliseconds since the first event."""
    clock = _clock(log)
    stride = max(1, -(-len(log.steps) // MAX_STEPS))
    requests = _fitting(log.requests)
    stops = log.steps["stop"]
    return {
        "meta": {
            "subtitle": _subtitle(log),
            "notes": _notes(log, stride, len(requests)),
            "num_steps": len(log.steps),
            "stride": stride,
            "duration_ms": clock(log.end),
            "total_blocks": log.num_total_blocks,
        },
        "summary": [[figure.label, _figure_text(figure)] for figure in summarize(log) if figure.value is not None],
        "percentiles": [_percentiles(label, log.latency(name)) for name, label in LATENCIES],
        "advice": _advice(log) or _what_stopped(log),
        "stops": ADMISSION_STOPS,
        "letters": STOP_LETTERS,
        "stop_counts": [stops.count(index) for index in range(len(ADMISSION_STOPS))],
        "kinds": _KINDS,
        "steps": _steps(log, stride, clock),
        "requests": [_request(request, clock) for request in requests],
        "config": log.header.config,
    }


def _clock(log: RunLog) -> Callable[[float], float]:
    return lambda moment: round((moment - log.start) * 1e3, 3)


def _subtitle(log: RunLog) -> str:
    header = log.header
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(header.unix_time + (log.start - header.perf_counter)))
    return printable(f"{header.model or 'no name'}, aioengine {header.engine_version}, {began}, {log.duration:.1f} s")


def _notes(log: RunLog, stride: int, num_shown: int) -> list[str]:
    """What the page leaves out, said on it."""
    notes = []
    if stride > 1:
        notes.append(f"Of {len(log.steps)} steps every {stride}th is in the graphs; the pieces of the waterfall are exact.")
    if num_shown < len(log.requests):
        notes.append(f"{num_shown} of {len(log.requests)} requests, spread evenly, are in the waterfall.")
    if log.num_gaps:
        notes.append(f"Events are missing in {log.num_gaps} places of the recording.")
    return notes


def _fitting(requests: Sequence[RunRequest]) -> list[RunRequest]:
    """Every k-th request, with the least k that fits the page."""
    num_pieces = sum(len(request.pieces) for request in requests)
    stride = max(1, -(-len(requests) // MAX_REQUESTS), -(-num_pieces // MAX_PIECES))
    return list(requests[::stride])


def _figure_text(figure: Figure) -> str:
    assert figure.value is not None, "the caller has looked"
    text = f"{figure.value:,.{figure.digits}f}"
    return f"{text} {figure.unit}" if figure.unit else text


def _percentiles(label: str, samples: Samples) -> list[Any]:
    values = [*samples.quantiles(0.5, 0.95, 0.99), samples.mean]
    return [label, [None if value is None else round(value * 1e3, 3) for value in values], len(samples)]


def _advice(log: RunLog) -> list[str]:
    whole = len(log.steps) <= ADVICE_STEPS
    return [printable(f"{'' if whole else f'Steps {said.first_step} to {said.last_step}: '}{said.words}") for said in log.advice]


def _what_stopped(log: RunLog) -> list[str]:
    stops, total = log.steps["stop"], len(log.steps)
    counted = sorted(((stops.count(index), name) for index, name in enumerate(ADMISSION_STOPS)), reverse=True)
    return [f"{100 * count / total:.0f} % of the steps stopped admitting at {name}." for count, name in counted if count]


def _steps(log: RunLog, stride: int, clock: Callable[[float], float]) -> dict[str, list[Any]]:
    steps = log.steps
    columns: dict[str, list[Any]] = {short: steps[name][::stride].tolist() for name, short in _STEP_COLUMNS.items()}
    columns["t"] = [clock(moment) for moment in steps["schedule_start"][::stride]]
    columns["e"] = [None if moment != moment else clock(moment) for moment in steps["update_end"][::stride]]
    return columns


def _request(request: RunRequest, clock: Callable[[float], float]) -> dict[str, Any]:
    value: dict[str, Any] = {
        "id": printable(request.request_id),
        "a": clock(request.arrival_time),
        "np": request.num_prompt_tokens,
        "nc": request.num_cached_tokens,
        "no": request.num_output_tokens,
        "max": request.max_tokens,
        "pri": request.priority,
        "pre": request.num_preemptions,
        "q": _ms(request.queue_wait),
        "t": _ms(request.ttft),
        "e": _ms(request.e2e),
        "end": request.finish_reason,
        "g": _ms(request.slowest_gap or None),
        "gs": request.slowest_gap_step,
        "p": [
            [
                _KINDS.index(piece.kind), piece.first_step, piece.last_step, clock(piece.start), clock(piece.end),
                piece.tokens or piece.num_tokens,
            ]
            for piece in request.pieces
        ],
    }  # fmt: skip
    if request.prompt is not None:
        value["prompt"] = printable(request.prompt, keep=PROSE)
    if request.text is not None:
        value["text"] = printable(request.text, keep=PROSE)
    return value


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
