"""What a runner is: a process that holds one engine and answers on stdin and stdout. Standard library only.

`aioengine bench compare` starts it with the engine's own Python and speaks lines of JSON with it:

    -> {"model_folder", "gguf", "max_num_seqs", "max_model_len", "num_threads", "max_num_batched_tokens"}
    <- {"ready": true, "startup_s", "engine", "version", "precision", "note"}
    -> {"requests": [{"prompt": [ids], "max_tokens": n}, ...]}          any number of times
    <- {"wall_s", "chunks": [[[seconds since the start, tokens], ...], ...], "token_ids": [[ids], ...] or null, "peak_rss_mb",
        "errors": [text or "", ...], "unseen": [tokens that are counted in chunks and were never sent, ...]}

All requests of a message are sent at once, decoded greedily, and run to `max_tokens` whatever tokens come.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

Request = dict[str, Any]
"""{"prompt": token ids, "max_tokens": n}"""


@dataclass
class Answer:
    """One request's chunks as (seconds since the start of the run, tokens), and its tokens.

    num_unseen: tokens that the engine counts and never sent. error: why there is no whole answer.
    """

    chunks: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_unseen: int = 0
    error: str = ""

    def add(self, seconds: float, token_ids: list[int]) -> None:
        if token_ids:
            self.chunks.append((seconds, len(token_ids)))
            self.token_ids += token_ids

    def add_unseen(self, seconds: float, num_tokens: int) -> None:
        """Work that was done: it counts, though nobody knows which tokens they are."""
        if num_tokens > 0:
            self.chunks.append((seconds, num_tokens))
            self.num_unseen += num_tokens


class Engine(Protocol):
    """What a runner provides."""

    name: str
    version: str
    precision: str  # of the weights and of the arithmetic, for people
    note: str
    tells_tokens: bool = True  # false: it says how many, and not which

    def run(self, requests: list[Request]) -> list[Answer]:
        """All requests at once; returns when the last is through."""

    def close(self) -> None:
        """Stop whatever was started."""


@runtime_checkable
class TimesItself(Protocol):
    """An engine whose run holds more than the work, such as loading the model."""

    def wall_s(self, answers: list[Answer]) -> float:
        """Seconds of the work alone."""


def serve(load: Callable[[dict[str, Any]], Engine], *, prepare: Callable[[dict[str, Any]], None] | None = None) -> None:
    """The main function of a runner. `prepare` does what is done once for a model, before the start-up is timed."""
    # Engines print what they like to stdout: the protocol keeps the real one to itself.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    settings = json.loads(sys.stdin.readline())
    if prepare is not None:
        prepare(settings)
    start = time.perf_counter()
    engine = load(settings)
    facts = {"engine": engine.name, "version": engine.version, "precision": engine.precision, "note": engine.note}
    send({"ready": True, "startup_s": time.perf_counter() - start, **facts})
    try:
        for line in sys.stdin:
            requests = json.loads(line)["requests"]
            begin = time.perf_counter()
            answers = engine.run(requests)
            send(
                {
                    "wall_s": engine.wall_s(answers) if isinstance(engine, TimesItself) else time.perf_counter() - begin,
                    "chunks": [answer.chunks for answer in answers],
                    "token_ids": [answer.token_ids for answer in answers] if engine.tells_tokens else None,
                    "errors": [answer.error for answer in answers],
                    "unseen": [answer.num_unseen for answer in answers],
                    "peak_rss_mb": peak_rss_mb(),
                }
            )
    finally:
        engine.close()


def peak_rss_mb() -> float | None:
    """The most memory that this process and its children have held, added up; None where /proc does not tell."""
    try:
        return sum(_high_water_mb(pid) for pid in _family(os.getpid()))
    except OSError:
        return None


def _high_water_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _family(pid: int) -> list[int]:
    family = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="utf-8").split():
            family += _family(int(child))
    return family
