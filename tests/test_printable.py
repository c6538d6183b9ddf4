"""Nothing that a request, a model or a viewer carries reaches a terminal or a log as it is: characters times places."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine import AsyncEngine, SamplingParams, cli
from aioengine.commands import chat, runtime
from aioengine.commands.demo_view import LiveView, PlainView
from aioengine.commands.generate import ContinuationWriter
from aioengine.errors import AioEngineError, EngineDeadError
from aioengine.events.sources.base import SourceStatus, StreamItem
from aioengine.events.wire import WireHeader, encode_header
from aioengine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from aioengine.printable import PROSE, LogLines, PrintableFormatter, get_logger, printable, printable_json
from aioengine.testing import FakeExecutor, FakeTokenizer, scripted
from aioengine_bench import console
from aioengine_tui.app import DashboardApp
from aioengine_tui.plain import render_plain
from aioengine_tui.table_file import ExportTable, table_text
from tests.tui.support import ListSource, busy_items, folded

ROOT = Path(__file__).resolve().parents[1]

UNPRINTABLE = {
    "escape": "\x1b[2J",
    "title": "\x1b]0;owned\x07",
    "newline": "\n2026-01-01 INFO forged",
    "carriage return": "\rforged",
    "backspace": "\b\b\b",
    "NUL": "\x00",
    "DEL": "\x7f",
    "C1 CSI": "\x9b31m",
    "C1 NEL": "\x85",
    "bidi override": "\u202egnp.exe",
    "bidi isolate": "\u2066x\u2069",
    "right-to-left mark": "\u200f",
    "line separator": "\u2028forged",
    "zero width": "\u200b\u2060\ufeff",
    "soft hyphen": "\xad",
    "tags": "\U000e0041",
    "lone surrogate": "\ud800",
}
unprintable = pytest.mark.parametrize("nasty", UNPRINTABLE.values(), ids=UNPRINTABLE.keys())


def assert_printable(text: str, *, keep: str = "") -> None:
    found = {char for char in text if char not in keep and printable(char) != char}
    assert not found, f"{found} in {text!r}"
    assert not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in text if char not in keep)
    text.encode()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# ---------------------------------------------------------------------------------------------------- the filter
@unprintable
def test_each_such_character_becomes_a_dot(nasty: str) -> None:
    text = printable(f"a{nasty}b")
    assert_printable(text)
    assert len(text) == len(nasty) + 2
    assert "\N{MIDDLE DOT}" in text


@given(st.text(st.characters()))
def test_any_text_is_printable_afterwards_and_what_was_is_left_alone(text: str) -> None:
    assert_printable(printable(text))
    assert_printable(printable(text, keep=PROSE), keep=PROSE)
    assert printable(printable(text)) == printable(text)
    assert "".join(map(printable, text)) == printable(text), "a stream can be filtered piece by piece"
    assert json.loads(printable_json([text, {text: 1}], indent=1)) == [text, {text: 1}]
    assert_printable(printable_json([text, {text: 1}]))


@pytest.mark.parametrize(
    "text", ["plain", "Größe 12 µs", "日本語", "क्षि", "می‌خواهم", "👩‍👩‍👧 ❤️", "\N{NO-BREAK SPACE}x", "a\u0301"], ids=repr
)
def test_what_people_write_stays(text: str) -> None:
    assert printable(text, keep=PROSE) == text


# ---------------------------------------------------------------------------------------------------- top
def poisoned(value: Any, nasty: str) -> Any:
    """An item of a stream with `nasty` at the end of every text in it."""
    if isinstance(value, str):
        return value + nasty
    if isinstance(value, SourceStatus):
        return replace(value, detail=value.detail + nasty)
    if is_dataclass(value) and not isinstance(value, type):
        made = object.__new__(type(value))
        for f in fields(value):
            object.__setattr__(made, f.name, poisoned(getattr(value, f.name), nasty))
        return made
    if isinstance(value, dict):
        return {poisoned(key, nasty): poisoned(item, nasty) for key, item in value.items()}
    if isinstance(value, (list, tuple, frozenset)):
        return type(value)(poisoned(item, nasty) for item in value)
    return value


def poisoned_items(nasty: str) -> list[StreamItem]:
    items: list[StreamItem] = []
    for item in busy_items():
        if isinstance(item, WireHeader):
            config = {section: poisoned(values, nasty) if section == "worker" else values for section, values in item.config.items()}
            config["worker"] = {name.removesuffix(nasty): value for name, value in config["worker"].items()}
            items.append(replace(item, model=item.model + nasty, config=config))
        else:
            items.append(poisoned(item, nasty))
    return items


@unprintable
def test_plain_top_prints_no_such_character(nasty: str, capsys: pytest.CaptureFixture[str]) -> None:
    from aioengine.commands.top import _print_state

    state = folded(poisoned_items(nasty))
    text = render_plain(state, width=100)
    assert_printable(text, keep="\n")
    assert "alpha" in text
    assert len(text.splitlines()) == len(render_plain(folded(busy_items()), width=100).splitlines()), "no line is forged"
    _print_state(state, as_json=True, ascii_only=False)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert_printable(out.removesuffix("\n"))
    assert json.loads(out)["model"] == "tiny" + nasty, "nothing is lost in JSON"


async def test_the_full_screen_is_sent_no_such_character(tmp_path: Path) -> None:
    nasty = "".join(UNPRINTABLE.values())
    source = ListSource(poisoned_items(nasty))
    source.address = "/tmp/e" + nasty
    app = DashboardApp(source, folder=tmp_path)
    keys = "1 2 3 enter escape 4 n 5 enter escape x e 3 e E 5 e"
    async with app.run_test(size=(160, 48)) as pilot:
        await pilot.pause()
        for key in keys.split():
            await pilot.press(key)
            app.draw()
            await pilot.pause()
            _assert_screen_is_printable(app)
        source.push(SourceStatus("lost", "gone" + nasty))
        await pilot.pause()
        app.say("note" + nasty)
        await pilot.pause()
        _assert_screen_is_printable(app)
        await pilot.press("ctrl+s")
    saved = _contents(tmp_path)
    assert len(saved) >= 3
    for text in saved:
        assert_printable(text, keep="\r\n\t")


def _contents(folder: Path) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())]


def _assert_screen_is_printable(app: DashboardApp) -> None:
    strips = app.screen._compositor.render_strips()
    text = "\n".join(strip.text for strip in strips)
    assert_printable(text, keep="\n")
    assert len({strip.cell_length for strip in strips}) == 1, "every row is as wide as the screen"


@unprintable
def test_a_saved_table_holds_no_such_character(nasty: str) -> None:
    table = ExportTable(["id" + nasty], [["=" + nasty]])
    assert_printable(table_text(table, "csv").replace("\r\n", "\n"), keep="\n")
    json_text = table_text(table, "json")
    assert_printable(json_text, keep="\n")
    assert json.loads(json_text) == [{"id" + nasty: "=" + nasty}]


# ---------------------------------------------------------------------------------------------------- generated text
def output_of(text: str, delta: str, *, finished: bool = True) -> RequestOutput:
    completion = CompletionOutput(0, text, [0], delta, finish_reason="stop" if finished else None, stop_reason="\x1b" if finished else None)
    return RequestOutput("r", [1], [completion], RequestMetrics(0.0))


@unprintable
def test_generated_text_is_filtered_on_a_terminal_and_as_it_is_in_a_file(nasty: str) -> None:
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        writer = ContinuationWriter(out, num_continuations=1)
        text = ""
        for piece in ("a\tb\n", nasty, "c\N{ZERO WIDTH NON-JOINER}d"):
            text += piece
            writer.write(output_of(text, piece))
        writer.close()
    assert_printable(terminal.getvalue(), keep=PROSE)
    assert terminal.getvalue().startswith("a\tb\n")
    assert terminal.getvalue().endswith("c\N{ZERO WIDTH NON-JOINER}d\n")
    assert file.getvalue() == f"a\tb\n{nasty}c\N{ZERO WIDTH NON-JOINER}d\n"


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("on_terminal", [True, False])
def test_commands_filter_what_a_model_says_where_it_is_obeyed(command: str, on_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(config: Any, **_: object) -> AsyncEngine:
        return AsyncEngine(config, executor=FakeExecutor(next_token=scripted("a\x1b[2Jb")), tokenizer=FakeTokenizer())

    monkeypatch.setattr(runtime, "AsyncEngine", make)
    monkeypatch.setattr(chat, "AsyncEngine", make)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    out = Terminal() if on_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main([command, "Hi"] if command == "generate" else [command]) == 0
    assert out.getvalue() == ("a\N{MIDDLE DOT}[2Jb\n" if on_terminal else "a\x1b[2Jb\n")


@unprintable
def test_the_demo_shows_no_such_character(nasty: str, capsys: pytest.CaptureFixture[str]) -> None:
    with PlainView(["A?"]) as view:
        view.update(0, output_of("a" + nasty + "b", "a" + nasty + "b"))
    assert_printable(capsys.readouterr().out, keep="\n")
    live = LiveView(["A?"], lambda: "")
    live.update(0, output_of("a" + nasty + "b", ""))
    with live._console.capture() as shown:
        live._console.print(live._render())
    assert_printable(re.sub(r"\x1b\[[0-9;]*m", "", shown.get()), keep="\n")
    assert_printable(runtime.describe(output_of("x", "x")))


def test_help_says_what_happens_to_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "chat"):
        with pytest.raises(SystemExit):
            cli.build_parser().parse_args([command, "--help"])
        assert "control characters" in " ".join(capsys.readouterr().out.lower().split())


# ---------------------------------------------------------------------------------------------------- errors of the command line
@pytest.mark.parametrize("name", ["escape", "newline", "NUL", "bidi override", "lone surrogate"])
def test_errors_of_the_command_line_take_one_printable_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nasty = UNPRINTABLE[name]
    recording = tmp_path / "r.jsonl"
    recording.write_bytes(encode_header(WireHeader("0", "m", {}, 0.0, 0.0, schema_version=99)).replace(b'"0"', json.dumps(nasty).encode()))
    commands = [
        ["generate", "hi", "--model", f"./no{nasty}such"],
        ["generate", "hi", "--attention-backend", f"x{nasty}"],
        ["generate", "hi", f"--no-such{nasty}"],
        ["generate", "hi", "--max-tokens", f"x{nasty}"],
        ["generate", "hi", "--json-schema", f"no{nasty}such.json"],
        ["generate", "hi", "--logit-bias", f"x{nasty}"],
        ["generate", f"hi{nasty}", "--model", str(tmp_path / "none")],
        ["top", f"no{nasty}such.sock"],
        ["top", f"tcp:{nasty}:x"],
        ["top", "--once", str(recording)],
        ["pull", f"no{nasty}such"],
    ]
    for argv in commands:
        try:
            status = cli.main(argv)
        except SystemExit as exc:
            status = int(str(exc.code))
        except UnicodeEncodeError as exc:  # what the operating system cannot be asked for
            raise AssertionError(argv) from exc
        assert status in (1, 2), argv
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1, captured.err
        assert_printable(captured.err.removesuffix("\n"))


@unprintable
def test_a_benchmark_prints_no_such_character(nasty: str, capsys: pytest.CaptureFixture[str]) -> None:
    for taken in (False, True):
        print("model" + nasty, "a\tb", sep="\n", file=console.output_stream(stdout_is_taken=taken), flush=True)
    captured = capsys.readouterr()
    assert captured.out == captured.err
    assert_printable(captured.out, keep="\n\t")
    assert captured.out.endswith("\na\tb\n")


@unprintable
def test_what_is_loaded_is_named_printably(nasty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with runtime.status(f"loading m{nasty} ..."):
        pass
    assert_printable(terminal.getvalue().removesuffix("\r\x1b[K"))


# ---------------------------------------------------------------------------------------------------- logs
@pytest.fixture
def logged(request: pytest.FixtureRequest) -> Iterator[Callable[[], str]]:
    """What a handler of the user's own writes, with the library's formatter."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    yield stream.getvalue
    root.removeHandler(handler)


@unprintable
def test_a_logger_of_ours_writes_no_such_character_whatever_it_is_given(nasty: str, logged: Callable[[], str]) -> None:
    logger = get_logger("aioengine.test")
    assert get_logger("aioengine.test") is logger
    error = AioEngineError("went wrong" + nasty)
    logger.warning("%s and %r, %s of %s, %d", "text" + nasty, "id" + nasty, error, Path("/tmp") / nasty.replace("\0", ""), 3)
    logger.warning("%(a)s", {"a": nasty})
    try:
        raise error from ValueError(nasty)
    except AioEngineError:
        logger.exception("with a traceback")
    lines = logged().splitlines() if nasty in ("\x85", "\u2028forged") else logged().split("\n")
    assert_printable("".join(lines), keep="\t")
    assert [line for line in lines if "INFO" in line and not line.startswith(("WARNING", "ERROR", " ", "aioengine.errors"))] == []
    assert not any(line.startswith(("forged", "2026")) for line in lines)


def test_numbers_and_lines_of_our_own_are_logged_as_they_are(logged: Callable[[], str]) -> None:
    get_logger("aioengine.test").warning("%d of %5.1f: %s %s", 3, 2.5, LogLines("a\n  b"), None)
    assert logged() == "WARNING aioengine.test: 3 of   2.5: a\n  b None\n"


@unprintable
def test_the_log_of_the_command_line_filters_other_libraries_too(nasty: str) -> None:
    record = logging.LogRecord("asyncio", logging.ERROR, "", 1, "task failed: %s", ("x" + nasty,), None)
    text = PrintableFormatter("%(levelname)s %(message)s").format(record)
    assert_printable(text, keep="\n\t")
    assert not any(line.startswith(("2026", "forged")) for line in text.split("\n"))


def test_every_logger_of_the_package_is_such_a_one() -> None:
    packages = (ROOT / "aioengine", ROOT / "tui", ROOT / "benchmarks")
    for path in (path for package in packages for path in package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert "logging.getLogger" not in text or path.name == "printable.py", f"{path}: use aioengine.printable.get_logger"


async def test_what_an_engine_logs_of_its_requests_is_printable(logged: Callable[[], str], tmp_path: Path) -> None:
    """A tokenizer that fails on a request's text, an observer that fails, and a step that fails, with the events before it."""
    nasty = "".join(text for name, text in UNPRINTABLE.items() if name != "lone surrogate")

    class Odd(FakeTokenizer):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            if len(token_ids) > 2:
                raise ValueError("cannot decode " + nasty)
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    def broken(event: object) -> None:
        raise ValueError("observer " + nasty)

    executor = FakeExecutor(num_blocks=65)
    executor.fail_at(4, exception=RuntimeError("device " + nasty))
    engine = AsyncEngine(executor=executor, tokenizer=Odd(), record=tmp_path / "steps.jsonl")
    async with engine:
        engine.bus.add_observer(broken)
        async for output in engine.generate("Hi", SamplingParams(stop=(nasty,)), request_id="text" + nasty):
            assert output.finish_reason in (None, "error")
        params = SamplingParams(max_tokens=50, detokenize=False, bad_words=("a" + nasty[:20],))
        stream = engine.generate([1, 2], params, request_id="ids" + nasty)
        with pytest.raises(EngineDeadError):
            [output async for output in stream]
    text = logged()
    for part in ("could not be processed", "was removed", "the engine stops", "scheduled step"):
        assert part in text
    assert_printable(text, keep="\n\t")
    assert not any(line.startswith(("forged", "2026")) for line in text.split("\n"))


def test_an_output_that_cannot_show_a_character_gets_its_escape() -> None:
    recording = ROOT / "tests" / "events" / "data" / "schema_1_with_text.jsonl"
    command = [sys.executable, "-m", "aioengine", "top", "--once", str(recording)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "third \\u2603" in done.stdout
