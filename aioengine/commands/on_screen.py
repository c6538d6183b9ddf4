"""How a screen of `aioengine top` runs: until the user leaves it, or SIGTERM comes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from aioengine.commands.termination import EXIT_TERMINATED, signals_handled_by
from aioengine_tui.terminals import can_draw, wants_ascii

if TYPE_CHECKING:
    from textual.app import App

R = TypeVar("R")


def is_screen() -> bool:
    """Whether standard output can show one. A browser's page runs the command with its output connected to the web server."""
    return (sys.stdout.isatty() and can_draw(os.environ)) or "TEXTUAL_DRIVER" in os.environ


def draws_ascii(*, asked: bool) -> bool:
    return asked or wants_ascii(os.environ)


def run_on_screen(app: App[R]) -> R | None:
    """What the app returns. Raises SystemExit(143) after a SIGTERM, when the terminal is as it was."""
    result: R | None = asyncio.run(_run(app))
    if app.return_code == EXIT_TERMINATED:
        raise SystemExit(EXIT_TERMINATED)
    return result


async def _run(app: App[Any]) -> Any:
    loop = asyncio.get_running_loop()

    def leave(signum: int, frame: FrameType | None) -> None:
        # By the app's own exit, which gives the terminal back; SystemExit would tear the app down in the middle of something.
        loop.call_soon_threadsafe(lambda: app.exit(return_code=EXIT_TERMINATED))

    with signals_handled_by(signal.SIGTERM, leave):
        return await app.run_async()
