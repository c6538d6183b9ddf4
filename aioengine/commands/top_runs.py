"""`aioengine top` on whole recordings: a trace, a report, a comparison."""

from __future__ import annotations

import gzip
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from aioengine.commands.on_screen import is_screen, run_on_screen
from aioengine.errors import AioEngineError, ConfigError
from aioengine.printable import printable, printable_json
from aioengine_tui.runs.compare import compare, comparison_to_json
from aioengine_tui.runs.reading import read_run
from aioengine_tui.runs.report import render_report
from aioengine_tui.runs.run_log import RunLog
from aioengine_tui.runs.trace import trace_lines
from aioengine_tui.terminals import as_ascii
from aioengine_tui.widgets.text import lines_text

_PLAIN_WIDTH = 100


def export_run(path: str, *, trace: str | None, report: str | None) -> None:
    """Read a recording once, and write what is wanted. A file that is there is replaced, when the new one is whole."""
    outputs = [Path(name) for name in (trace, report) if name is not None]
    _check_outputs(Path(path), outputs)
    log = _read(path)
    if trace is not None:
        _write(Path(trace), trace_lines(log))
    if report is not None:
        _write(Path(report), [render_report(log, title=f"Report of {Path(path).name}").encode()])
    for output in outputs:
        print(f"{printable(str(output))}: {len(log.steps)} steps, {len(log.requests)} requests, {output.stat().st_size / 1e6:.1f} MB")


def compare_runs(first: str, second: str, *, as_json: bool, theme: str, ascii_only: bool) -> None:
    """On the terminal, else as text or JSON."""
    comparison = compare(_read(first), _read(second))
    names = (first, second)
    if as_json:
        print(printable_json(comparison_to_json(comparison)))
    elif is_screen():
        from aioengine_tui.runs.compare_app import CompareApp

        run_on_screen(CompareApp(comparison, names, theme=theme, ascii_only=ascii_only))
    else:
        from aioengine_tui.runs.compare_lines import compare_lines

        text = lines_text(compare_lines(comparison, names, width=_PLAIN_WIDTH, axis="step"))
        print(as_ascii(text) if ascii_only else text)


def _read(path: str) -> RunLog:
    if not Path(path).is_file():
        raise AioEngineError(f"{path} is no recording" if Path(path).exists() else f"there is no {path}")
    shown = _progress(path) if sys.stderr.isatty() else None
    log = read_run(path, progress=shown)
    if shown is not None:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if not len(log.steps):
        raise AioEngineError(f"{path} has no step")
    return log


def _progress(path: str) -> Callable[[int, int], None]:
    def show(read: int, size: int) -> None:
        print(f"\rreading {printable(Path(path).name)} ... {100 * read / max(1, size):.0f} %", end="", file=sys.stderr, flush=True)

    return show


def _check_outputs(source: Path, outputs: list[Path]) -> None:
    """Before minutes are spent. Raises ConfigError."""
    for output in outputs:
        if output.exists() and source.exists() and output.samefile(source):
            raise ConfigError(f"{output} is the recording itself")
        if not output.absolute().parent.is_dir():
            raise ConfigError(f"there is no folder {output.absolute().parent}")
    if len(outputs) == 2 and outputs[0].absolute() == outputs[1].absolute():
        raise ConfigError(f"the trace and the report cannot both be {outputs[0]}")


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    """Whole or not at all; compressed if the name ends in ".gz"."""
    try:
        fd, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.absolute().parent)
        try:
            os.fchmod(fd, 0o666 & ~_umask())
            with os.fdopen(fd, "wb") as raw:
                if path.suffix == ".gz":
                    with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6) as file:
                        file.writelines(pieces)
                else:
                    raw.writelines(pieces)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as exc:
        raise AioEngineError(f"cannot write {path}: {exc.strerror or exc}") from exc


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
