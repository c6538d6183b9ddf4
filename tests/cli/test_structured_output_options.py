"""`aioengine generate --json-schema`, `--regex` and the others, with an engine that has no model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from aioengine.cli import main
from aioengine.commands import runtime
from aioengine.config import EngineConfig
from aioengine.engine.async_engine import AsyncEngine
from aioengine.testing import FakeExecutor, FakeTokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(config: EngineConfig, *, record: str | None = None, events: str | None = None) -> AsyncEngine:
        return AsyncEngine(config, executor=FakeExecutor(), tokenizer=FakeTokenizer(), record=record, events=events)

    monkeypatch.setattr(runtime, "AsyncEngine", make)


def generate(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["generate", "--raw", "Hi", "--max-tokens", "400", *options]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_each_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "list.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('start: "[" ITEM ("," ITEM)~2 "]"\nITEM: /[xyz]{2}/\n')
    for given in (str(schema), json.dumps(SCHEMA)):
        assert json.loads(generate(capsys, "--json-schema", given)) in ({"a": True}, {"a": False})
    assert re.fullmatch("[a-c]{4}!", generate(capsys, "--regex", "[a-c]{4}!"))
    assert generate(capsys, "--choice", "yes", "--choice", "no") in ("yes", "no")
    assert re.fullmatch(r"\[[xyz]{2}(,[xyz]{2}){2}\]", generate(capsys, "--grammar", str(grammar)))
    assert generate(capsys, "--json-object").startswith("{")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--regex", "a(b"], 2, "unclosed group"),
        (["--regex", ""], 2, "structured_outputs.regex must be a non-empty string"),
        (["--json-schema", "no-such.json"], 2, "--json-schema no-such.json: No such file or directory"),
        (["--json-schema", '{"type": "array", "uniqueItems": true}'], 2, "uniqueItems"),
        (["--grammar", "."], 2, "--grammar .: Is a directory"),
        (["--regex", "a", "--json-object"], 2, "not allowed with argument --regex"),
    ],
)
def test_errors_name_the_cause(options: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        result: object = main(["generate", "--raw", "Hi", *options])
    except SystemExit as exit_:
        result = exit_.code
    assert result == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
