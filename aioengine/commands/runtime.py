"""How a subcommand runs: its event loop, its status line, its last words."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, TextIO, TypeVar

from aioengine.commands.termination import Termination, drained_on_sigterm, leave, signals_handled_by
from aioengine.config import EngineConfig
from aioengine.core.scheduler_output import SchedulerStats
from aioengine.engine.async_engine import AsyncEngine
from aioengine.engine.publish_options import PublishOptions
from aioengine.outputs import RequestOutput
from aioengine.printable import PROSE, printable

T = TypeVar("T")

_EXIT_INTERRUPTED = 130  # 128 + SIGINT


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's if it is installed, else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end. Ctrl-C cancels it, so that it can clean up, and then raises KeyboardInterrupt; SIGTERM lets the
    requests of its engine end first (see `Termination`).
    """
    with (
        interrupts_leave_at_once(),  # once `main` has ended, and while the loop is closed
        asyncio.Runner(loop_factory=loop_factory()) as runner,
        interrupts_handled_by(signal.default_int_handler),  # the runner replaces this one, and no other, by its own
    ):
        return runner.run(Termination().run(main))


@asynccontextmanager
async def started_engine(
    config: EngineConfig, publish: PublishOptions, *, make: Callable[..., AsyncEngine] | None = None
) -> AsyncIterator[AsyncEngine]:
    """An engine that is loaded, and shut down at the end of the block. make: what builds it, in place of `AsyncEngine`."""
    engine = (make or AsyncEngine)(config, **publishing(publish))
    try:
        with interrupts_leave_at_once(), status(f"loading {config.model} ..."):
            await engine.start()
        gc.freeze()  # this process is ours: the collector need not look through the modules and the model again and again
        with drained_on_sigterm(engine):
            yield engine
    finally:
        with interrupts_leave_at_once():
            await engine.shutdown()
        gc.unfreeze()  # another engine may follow, and this one's memory is wanted back


def publishing(options: PublishOptions) -> dict[str, Any]:
    """The keywords of `AsyncEngine` for these options, without those that have their default."""
    given = ((f.name, getattr(options, f.name), f.default) for f in dataclasses.fields(options))
    return {name: value for name, value, default in given if value != default}


@contextmanager
def interrupts_leave_at_once() -> Iterator[None]:
    """Ctrl-C ends the process without ceremony while the block runs.

    For the times when there is nothing to save and a thread cannot be interrupted: loading a model, shutting down.
    """
    with interrupts_handled_by(_leave):
        yield


@contextmanager
def interrupts_handled_by(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    with signals_handled_by(signal.SIGINT, handler):
        yield


def _leave(signum: int, frame: FrameType | None) -> None:
    leave(_EXIT_INTERRUPTED)


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show `text` on the terminal while the block runs; nothing where stderr is no terminal."""
    shown = sys.stderr.isatty()
    if shown:
        sys.stderr.write(printable(text))
        sys.stderr.flush()
    try:
        yield
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def for_output(text: str, file: TextIO) -> str:
    """Generated text as `file` gets it: a terminal would obey control characters, anything else wants the text as it is."""
    return printable(text, keep=PROSE) if file.isatty() else text


def use_color() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def describe_draft_tokens(stats: SchedulerStats) -> str:
    """How many draft tokens of the engine were accepted; "" if it made none."""
    rate = stats.acceptance_rate
    return "" if rate is None else f", {rate:.0%} of {stats.num_draft_tokens} draft tokens accepted"


def describe(output: RequestOutput) -> str:
    """One line on a finished request: sizes, latency, speed, why it ended."""
    num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    parts = [f"{len(output.prompt_token_ids)} prompt tokens ({output.num_cached_tokens} cached)", f"{num_tokens} output tokens"]
    metrics = output.metrics
    ttft = metrics.time_to_first_token_s
    if ttft is not None:
        parts.append(f"first token after {ttft:.2f} s")
        if metrics.finished_time is not None and metrics.first_token_time is not None and num_tokens > 1:
            elapsed = metrics.finished_time - metrics.first_token_time
            parts.append(f"then {(num_tokens - 1) / max(elapsed, 1e-9):.1f} tokens/s")
    reasons = dict.fromkeys(
        f"{completion.finish_reason} ({completion.stop_reason!r})" if completion.stop_reason else str(completion.finish_reason)
        for completion in output.outputs
    )
    return printable(", ".join([*parts, f"ended by {' and '.join(reasons)}"]))
