"""What a server without a model answers: a script, in JSON.

    {
      "tokens_per_s": 200,
      "answers": [
        {"when": {"role": "tool"}, "text": "It is 21 degrees in Paris."},
        {"when": {"contains": "weather"}, "tool_calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}]},
        {"when": {"contains": "retry"}, "times": 2, "error": {"status": 429, "message": "too many requests"}},
        {"when": {"matches": "^slow"}, "delay_ms": 300, "tokens_per_s": 20, "text": "Slowly."},
        {"when": {"contains": "break"}, "text": "This breaks off", "fail_after_tokens": 5},
        {"text": "Hello!"}
      ]
    }

The first answer whose `when` fits counts. `when` is about the last message of a chat, or the prompt of a completion: `contains`
and `matches` (a regular expression, found anywhere) about its text, `role` about who wrote it; all that are given must fit, and
without `when` everything does. `times`: the answer serves that many requests, and then the next one that fits does.

An answer is `text`, `tool_calls` (with a text before them, if both are given) or an `error` in place of one, told by its HTTP
status. A token is a byte of UTF-8. `delay_ms` passes before the request reaches the scheduler. `tokens_per_s` of the script is the
speed of the pretended device, and that of an answer slows the batch that it is in down, as a slow device would;
`prefill_tokens_per_s` is what prompts take. `fail_after_tokens` ends the request with an error in the middle, and
`disconnect_after_tokens` drops the connection of a stream.

Where nothing fits, the server says the same sentence to everybody. A grammar (JSON mode, a schema, a tool that must be called) is
always obeyed: the scripted answer is given if it matches, else the shortest one that does, or nearly. Nothing is random.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from aioengine.errors import ConfigError

DEFAULT_TEXT = "This is a fake engine: it has no model, and says the same to everybody."


class When(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    contains: str | None = None
    matches: str | None = None
    role: str | None = None

    def fits(self, role: str | None, text: str) -> bool:
        return (
            (self.role is None or self.role == role)
            and (self.contains is None or self.contains in text)
            and (self.matches is None or re.search(self.matches, text) is not None)
        )


class ScriptedCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] = {}


class ScriptedError(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    status: int
    message: str = "an error of the script"
    type: str = "server_error"


class Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    when: When | None = None
    times: int | None = None
    text: str | None = None
    tool_calls: list[ScriptedCall] | None = None
    error: ScriptedError | None = None
    delay_ms: float = 0.0
    tokens_per_s: float | None = None
    fail_after_tokens: int | None = None
    disconnect_after_tokens: int | None = None


class Script(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    answers: list[Answer] = []
    tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None


def read_script(path: str | Path) -> Script:
    """Raises ConfigError saying where in the file something is wrong."""
    try:
        content = Path(path).read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read the script {path}: {exc.strerror}") from exc
    try:
        return parse_script(content)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc}") from None


def parse_script(content: bytes | str) -> Script:
    """Raises ConfigError."""
    try:
        script = msgspec.json.decode(content, type=Script)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"the script cannot be read: {exc}") from None
    check_script(script)
    return script


def check_script(script: Script) -> None:
    """Raises ConfigError naming the field and its value."""
    _check_rates(script, "", ("tokens_per_s", "prefill_tokens_per_s"))
    for index, answer in enumerate(script.answers):
        where = f"answers[{index}]."
        _check_rates(answer, where, ("tokens_per_s",))
        for name, least in (("times", 1), ("fail_after_tokens", 0), ("disconnect_after_tokens", 0)):
            value = getattr(answer, name)
            if value is not None and value < least:
                raise ConfigError(f"{where}{name} must be at least {least}, got {value}")
        if not (math.isfinite(answer.delay_ms) and answer.delay_ms >= 0):
            raise ConfigError(f"{where}delay_ms must be a number of at least 0, got {answer.delay_ms}")
        if answer.error is not None and (answer.text is not None or answer.tool_calls is not None):
            raise ConfigError(f"{where}error takes the place of text and tool_calls: give one of them")
        if answer.error is not None and not 400 <= answer.error.status <= 599:
            raise ConfigError(f"{where}error.status must be between 400 and 599, got {answer.error.status}")
        if answer.when is not None and answer.when.matches is not None:
            try:
                re.compile(answer.when.matches)
            except re.error as exc:
                raise ConfigError(f"{where}when.matches is no regular expression: {exc}") from None


def _check_rates(owner: object, where: str, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{where}{name} must be a number above 0, got {value}")


class Play:
    """A script and how often each of its answers was given."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._num_given = [0] * len(script.answers)

    def next_answer(self, role: str | None, text: str) -> int:
        """The index of the answer to this message; -1 where none fits."""
        for index, answer in enumerate(self.script.answers):
            if answer.when is not None and not answer.when.fits(role, text):
                continue
            if answer.times is not None and self._num_given[index] >= answer.times:
                continue
            self._num_given[index] += 1
            return index
        return -1

    def answer(self, index: int) -> Answer:
        return self.script.answers[index] if index >= 0 else Answer(text=DEFAULT_TEXT)


def written_forms(answer: Answer) -> list[str]:
    """The answer as a model would write it: first freely, then in the forms that a grammar for tools or for JSON may ask for."""
    text = answer.text or ""
    calls = answer.tool_calls or []
    if not calls:
        return [text if answer.text is not None else DEFAULT_TEXT]
    plain = [{"name": call.name, "arguments": call.arguments} for call in calls]
    free = "\n".join(f"<tool_call>\n{_spaced(call)}\n</tool_call>" for call in plain)
    forms = [f"{text}\n{free}" if text else free]
    renamed = [{"name": call.name, "parameters": call.arguments} for call in calls]
    for value in (plain, renamed, plain[0], renamed[0], calls[0].arguments):
        forms += [msgspec.json.encode(value).decode(), _spaced(value)]
    return forms


def _spaced(value: Any) -> str:
    """With spaces behind colons and commas, as models write JSON."""
    return json.dumps(value, ensure_ascii=False)
