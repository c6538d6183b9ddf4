"""`aioengine top`: the dashboard, on the terminal, as plain text, as JSON, or in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from aioengine.commands.hindsight import RecordingHindsight
from aioengine.commands.on_screen import is_screen, run_on_screen
from aioengine.commands.runtime import interrupts_leave_at_once, run, status
from aioengine.commands.termination import EXIT_TERMINATED, signals_handled_by
from aioengine.commands.top_fleet import check_addresses, find_addresses, print_fleet, show_fleet
from aioengine.errors import AioEngineError
from aioengine.events.address import socket_folder
from aioengine.events.sources.base import StepSource
from aioengine.events.sources.open import open_source
from aioengine.printable import printable_json
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.state_json import state_to_json
from aioengine_tui.model.why.hindsight import Verification, verification_words
from aioengine_tui.plain import render_plain
from aioengine_tui.terminals import as_ascii

if TYPE_CHECKING:
    from aioengine.config import EngineConfig
    from aioengine_tui.app import DashboardApp

_FIRST_STATE_S = 10.0  # longest wait for the first state of an engine
_SETTLE_S = 1.5  # --once on a live engine: long enough for rates to mean something
_PLAIN_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class TopSettings:
    addresses: tuple[str, ...]  # none: the demo's engine, the tour, or those that are found
    demo: bool
    tour: bool
    once: bool
    as_json: bool
    web: bool
    host: str
    port: int
    theme: str
    refresh: float
    ascii_only: bool
    token: str | None
    demo_config: EngineConfig
    verify: bool = False  # run a recording again at once


def top(settings: TopSettings) -> None:
    """Raises SystemExit(143) after a SIGTERM, when the terminal is as it was and the engine of --demo has ended."""
    check_addresses(settings.addresses)
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_handled_by(signal.SIGTERM, _terminate))
        if settings.tour:
            _tour(settings)
            return
        addresses: Sequence[str] = settings.addresses
        if settings.demo:
            addresses = [stack.enter_context(demo_engine(settings.demo_config))]
        elif not addresses and not settings.web:
            addresses = find_addresses()
        if settings.web:
            _serve(addresses, settings)
        elif settings.once or settings.as_json or not is_screen():
            printing = _print_states(addresses[0], settings) if len(addresses) == 1 else _print_fleet(addresses, settings)
            run(_until_terminated(printing))
        elif len(addresses) == 1:
            _show(addresses[0], settings)
        else:
            show_fleet(
                settings.addresses,
                token=settings.token,
                theme=settings.theme,
                refresh=settings.refresh,
                ascii_only=settings.ascii_only,
                show_one=lambda address: _show(address, settings),
            )


def _show(address: str, settings: TopSettings) -> None:
    from aioengine_tui.app import DashboardApp

    source = open_source(address, make_state=DashboardState, token=settings.token)
    # A hundred events a second are thousands of new objects and no cycles: looking for cycles often costs a sixth of it all.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    _run_to_its_end(
        DashboardApp(
            source,
            theme=settings.theme,
            refresh=settings.refresh,
            ascii_only=settings.ascii_only,
            hindsight=RecordingHindsight(address) if source.playback is not None else None,
            verify=settings.verify,
        )
    )


def _tour(settings: TopSettings) -> None:
    """On a terminal the scenes; elsewhere what is said about them."""
    from aioengine.commands.tour_recording import record_scene
    from aioengine.commands.tour_scenes import SCENES
    from aioengine_tui.tour import TourApp, TourSource, tour_text

    with tempfile.TemporaryDirectory(prefix="aioengine-tour-") as folder:
        scenes = [record_scene(script, Path(folder)) for script in SCENES]
        if is_screen():
            source = TourSource(scenes, make_state=DashboardState)
            _run_to_its_end(TourApp(source, theme=settings.theme, refresh=settings.refresh, ascii_only=settings.ascii_only))
        else:
            print(tour_text(scenes))


def _run_to_its_end(app: DashboardApp) -> None:
    run_on_screen(app)
    if app.return_code:
        raise AioEngineError(app.failure or "the dashboard ended with an error")


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """Unwinds what is under way: its `finally` blocks end the engine of --demo and remove its folder."""
    raise SystemExit(EXIT_TERMINATED)


# ---------------------------------------------------------------------------------------------------- plain text
async def _until_terminated(printing: Coroutine[None, None, None]) -> None:
    with signals_handled_by(signal.SIGTERM, _terminate):  # `run` would end the process at once: there is no engine to drain
        await printing


async def _print_fleet(addresses: Sequence[str], settings: TopSettings) -> None:
    await print_fleet(addresses, token=settings.token, once=settings.once, as_json=settings.as_json, ascii_only=settings.ascii_only)


async def _print_states(address: str, settings: TopSettings) -> None:
    """One state, or one every few seconds until the source ends."""
    state = DashboardState()
    async with open_source(address, make_state=DashboardState, token=settings.token, whole_history=True) as source:
        taking = asyncio.create_task(_fold_items(source, state))
        try:
            if source.playback is not None:
                await source.playback.seek_fraction(1.0)  # of a recording the end is asked for
            await _wait_for_state(state, taking)
            if source.playback is None and settings.once:
                await asyncio.wait([taking], timeout=_SETTLE_S)
            while True:
                if source.playback is None:
                    state.tick(source.now())
                _print_state(state, as_json=settings.as_json, ascii_only=settings.ascii_only)
                if settings.verify and source.playback is not None and not settings.as_json:
                    print(verification_words(await _verify(address)), flush=True)
                if settings.once or source.playback is not None or taking.done():
                    break
                await asyncio.wait([taking], timeout=_PLAIN_INTERVAL_S)
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)


async def _verify(address: str) -> Verification:
    try:
        return await RecordingHindsight(address).verify()
    except AioEngineError as exc:
        return Verification("refused", words=str(exc))


async def _fold_items(source: StepSource, state: DashboardState) -> None:
    async for item in source:
        state.apply(item)


async def _wait_for_state(state: DashboardState, taking: asyncio.Task[None]) -> None:
    deadline = time.monotonic() + _FIRST_STATE_S
    while state.stats is None and not taking.done():
        if time.monotonic() > deadline:
            raise AioEngineError(f"no state came within {_FIRST_STATE_S:g} s")
        await asyncio.wait([taking], timeout=0.02)
    if taking.done():
        taking.result()


def _print_state(state: DashboardState, *, as_json: bool, ascii_only: bool) -> None:
    if as_json:
        print(printable_json(state_to_json(state)), flush=True)
        return
    text = render_plain(state, width=100) + "\n"
    print(as_ascii(text) if ascii_only else text, flush=True)


# ---------------------------------------------------------------------------------------------------- browser
def _serve(addresses: Sequence[str], settings: TopSettings) -> None:
    """Serve the dashboard as a web page; every page is a viewer of its own."""
    try:
        from aioengine.commands.top_web import LocalServer
    except ImportError as exc:
        raise AioEngineError("--web needs the package textual-serve: pip install 'aioengine[web]'") from exc
    command = [sys.executable, "-m", "aioengine", "top", *addresses, "--theme", settings.theme, "--refresh", f"{settings.refresh:g}"]
    if settings.token is not None:
        os.environ["AIOENGINE_EVENTS_TOKEN"] = settings.token  # not on the command line, which other users can read
    LocalServer(shlex.join(command), host=settings.host, port=settings.port, title=" ".join(["aioengine top", *addresses])).serve()


# ---------------------------------------------------------------------------------------------------- demo
@contextlib.contextmanager
def demo_engine(config: EngineConfig) -> Iterator[str]:
    """An engine with a live workload in a child process; yields the address of its private socket.

    The child ends with this block, and by itself if this process is killed: its standard input closes then.
    """
    from aioengine.models.info import resolve_model

    with interrupts_leave_at_once():
        resolve_model(config.model)  # here, where the progress of a first download can be seen
    with socket_folder() as folder:
        address, log = Path(folder) / "events.sock", Path(folder) / "engine.log"
        with log.open("wb") as log_file:
            child = subprocess.Popen(
                [sys.executable, "-m", "aioengine.commands.demo_workload", str(address), "--config", config_to_json(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                start_new_session=True,  # Ctrl-C is for the dashboard, which ends the child itself
            )
        try:
            with status("starting the engine ..."):
                _wait_until_ready(child, log)
            yield str(address)
        finally:
            _end(child)


def config_to_json(config: EngineConfig) -> str:
    """The settings of `config` that differ from the defaults, for the child's command line."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    defaults = type(config)()
    return json.dumps({name: value for name, value in fields.items() if value != getattr(defaults, name)})


def _wait_until_ready(child: subprocess.Popen[bytes], log: Path) -> None:
    """The child says "ready" when its engine publishes, and nothing if it failed before."""
    assert child.stdout is not None, "it was started with a pipe"
    if not child.stdout.readline():
        said = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise AioEngineError(f"the engine of the demo ended with status {child.wait()}: {' | '.join(said) or 'it said nothing'}")


def _end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None, "it was started with a pipe"
    child.stdin.close()
    try:
        child.wait(timeout=10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if child.stdout is not None:
        child.stdout.close()
