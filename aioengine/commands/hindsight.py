"""Runs a recording again for the dashboard: in processes of their own, so that the screen goes on meanwhile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from aioengine.errors import AioEngineError
from aioengine_tui.model.why.hindsight import Verification, WhatIf

_LAST_LINE = 400  # characters of what a process said at its end


class RecordingHindsight:
    """Of one file."""

    def __init__(self, path: str | Path) -> None:
        self._path = str(Path(path).absolute())

    async def verify(self) -> Verification:
        """`aioengine replay`. Raises AioEngineError if the recording cannot be run again."""
        report = await _run(["replay", self._path, "--json"], good=(0, 1))
        difference = report["difference"]
        if difference is None:
            return Verification("verified", report["num_steps"])
        words = "{event} {step_id}: {field}: recorded {recorded}, now {now}".format(**difference)
        return Verification("different", report["num_steps"], words, difference["step_id"])

    async def what_if(self, setting: str, *, present: int, proposed: int) -> WhatIf:
        """`aioengine bench simulate`, both ways: a simulation is compared with a simulation. Raises AioEngineError."""
        sweep = f"{setting}={present},{proposed}"
        options = ["--metric-percentiles", "95", "--disable-tqdm", "--output-json", "-"]
        result = await _run(["bench", "simulate", "--from-recording", self._path, "--sweep", sweep, *options], good=(0,))
        was, would_be = result["runs"]

        def both(key: str, unit: float = 1.0) -> tuple[float | None, float | None]:
            first, second = (None if run[key] is None else run[key] * unit for run in (was, would_be))
            return first, second

        return WhatIf(
            num_preemptions=(was["num_preemptions"], would_be["num_preemptions"]),
            ttft_p95=both("p95_ttft_ms", 1e-3),
            output_throughput=both("output_throughput"),
        )


async def _run(arguments: Sequence[str], *, good: Sequence[int]) -> Any:
    """The JSON that a command of ours prints last. Raises AioEngineError with what it said instead."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aioengine", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:  # the dashboard was left meanwhile
            process.kill()
            await process.wait()
    if process.returncode not in good:
        said = err.decode(errors="replace").strip().splitlines() or [f"it ended with status {process.returncode}"]
        raise AioEngineError(said[-1][:_LAST_LINE].removeprefix("aioengine: ").removeprefix("error: "))
    return msgspec.json.decode(out.strip().splitlines()[-1])
