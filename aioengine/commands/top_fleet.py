"""`aioengine top` with several engines, or with none named: who publishes, and the fleet's screen, text and JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from aioengine.commands.on_screen import run_on_screen
from aioengine.errors import AioEngineError, ConfigError
from aioengine.events.discovery import find_engines
from aioengine.events.sources.base import StepSource
from aioengine.events.sources.open import open_source
from aioengine.printable import printable_json
from aioengine_tui.fleet.lines import fleet_lines, fleet_to_json
from aioengine_tui.fleet.members import Fleet
from aioengine_tui.model.state import DashboardState
from aioengine_tui.terminals import as_ascii
from aioengine_tui.widgets.text import lines_text

_FIRST_STATE_S = 10.0
_SETTLE_S = 1.5  # long enough for rates to mean something
_PLAIN_INTERVAL_S = 2.0
_PLAIN_WIDTH = 140


def find_addresses() -> list[str]:
    """Of the engines of this user that publish. Raises AioEngineError if there is none."""
    addresses = [engine.address for engine in find_engines()]
    if not addresses:
        raise AioEngineError(
            "no engine of yours publishes its events: start one with --events auto, or name an address, a recording or --demo"
        )
    return addresses


def check_addresses(addresses: Sequence[str]) -> None:
    """Raises ConfigError if a recording is among several: a list is of engines."""
    recording = next((address for address in addresses if Path(address).is_file()), None)
    if len(addresses) > 1 and recording is not None:
        raise ConfigError(f"{recording} is a recording, which is watched alone; --compare shows two side by side")


def fleet_source(address: str, token: str | None) -> StepSource:
    """A source of events of one engine of a fleet."""
    return open_source(address, make_state=DashboardState, token=token, reconnect=False)


def show_fleet(
    addresses: Sequence[str], *, token: str | None, theme: str, refresh: float, ascii_only: bool, show_one: Callable[[str], None]
) -> None:
    """The list on the terminal, and one engine after the other as the user opens them. addresses: none: those that are found."""
    from aioengine_tui.fleet.app import FleetApp

    chosen: str | None = None
    while True:
        app = FleetApp(
            (lambda: addresses) if addresses else (lambda: [engine.address for engine in find_engines()]),
            lambda address: fleet_source(address, token),
            theme=theme,
            refresh=refresh,
            start_at=chosen,
            ascii_only=ascii_only,
        )
        chosen = run_on_screen(app)
        if chosen is None:
            return
        show_one(chosen)


async def print_fleet(addresses: Sequence[str], *, token: str | None, once: bool, as_json: bool, ascii_only: bool) -> None:
    """One state of all engines, or one every few seconds until interrupted."""
    fleet = Fleet(lambda address: fleet_source(address, token))
    fleet.follow(addresses)
    try:
        await fleet.wait_until_reached(_FIRST_STATE_S)
        await asyncio.sleep(_SETTLE_S)
        while True:
            if as_json:
                print(printable_json(fleet_to_json(fleet.members)), flush=True)
            else:
                lines = fleet_lines(fleet.members, width=_PLAIN_WIDTH, height=len(fleet.members) + 4, cursor=None)
                text = lines_text(lines) + "\n"
                print(as_ascii(text) if ascii_only else text, flush=True)
            if once:
                return
            await asyncio.sleep(_PLAIN_INTERVAL_S)
    finally:
        await fleet.close()
