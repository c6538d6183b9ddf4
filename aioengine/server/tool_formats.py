"""The ways in which families of models write that they call a tool, and which one a model's chat template speaks."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aioengine.engine.outputs.detokenizer import TextTokenizer
from aioengine.server.tool_calls import CallScanner, MakeId, Piece, TextPiece, long_id, short_id

_SPACE = " \t\r\n"
_PROBE = "aioengine_probe"
_MAX_NAME_CHARS = 256
_MISTRAL_NAME_ENDS = re.compile(r"\[CALL_ID\]|\[ARGS\]|\{")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """begin, end: what is written around a call. also_bare: an answer that begins with an object may be a call without `begin`.

    is_special: the marks are special tokens, which must not be left out of the text. is_native, shows_history: the model's
    template writes tools into the prompt, and calls of earlier turns; where it does not, they are written for it.
    """

    name: str
    begin: str
    end: str
    also_bare: bool = False
    is_special: bool = False
    make_id: MakeId = long_id
    is_native: bool = True
    shows_history: bool = True


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")  # Qwen's too
LLAMA3 = ToolFormat("llama3_json", "<|python_tag|>", "", also_bare=True, is_special=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", is_special=True, make_id=short_id)
FORMATS = {tool_format.name: tool_format for tool_format in (HERMES, LLAMA3, MISTRAL)}


def detect_format(tokenizer: TextTokenizer) -> ToolFormat:
    """By what the template makes of a tool and of a call. One that knows of no tools gets Hermes' form, which is plain text."""
    tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
    asked: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    called = [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": _PROBE, "content": "y"},
    ]
    offered, history = _rendered(tokenizer, asked, [tool]), _rendered(tokenizer, called, None)
    is_native, shows_history = _PROBE in offered, _PROBE in history
    text = offered + history
    if "[TOOL_CALLS]" in text or "[AVAILABLE_TOOLS]" in text:
        found = MISTRAL
    elif "<tool_call>" not in text and ("<|python_tag|>" in text or ("<|start_header_id|>" in text and '"parameters"' in text)):
        found = LLAMA3
    else:
        found = HERMES
    return dataclasses.replace(found if is_native else HERMES, is_native=is_native, shows_history=is_native and shows_history)


def _rendered(tokenizer: TextTokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tools=tools) if tools else tokenizer.apply_chat_template(messages)
    except Exception:  # a template that refuses tools, or a tokenizer that has never heard of them
        return ""


def write_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls of an earlier turn as a model without a form of its own is told to write them."""
    texts = [json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}) for call in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def write_result(content: str) -> str:
    return f"<tool_response>\n{content}\n</tool_response>"


def write_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """For the system's message: Hermes' own words."""
    listed = "\n".join(json.dumps(tool) for tool in tools)
    return (
        "You may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


class FormattedCalls:
    """Text in which a model may call tools of its own will. What looks like a call and is none stays text.

    parallel: False: only the first call counts.
    """

    def __init__(self, tool_format: ToolFormat, names: Collection[str], *, parallel: bool) -> None:
        self.num_calls = 0
        self._format = tool_format
        self._names = names
        self._parallel = parallel
        self._held = ""  # not known yet what it is
        self._raw = ""  # what the scanner has read, should it turn out to be text
        self._scanner: CallScanner | None = None
        self._in_call = False  # the mark has come
        self._ended_call = False  # an end mark may follow
        self._at_start = True  # nothing but space has come

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held and self._advance(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        rest = self._raw + self._held if not (self._scanner and self._scanner.num_calls) else ""
        if self._ended_call and not rest.strip(_SPACE):
            rest = ""
        self._held = self._raw = ""
        return [TextPiece(rest)] if rest else []

    # ------------------------------------------------------------------ each says whether there may be more to do
    def _advance(self, pieces: list[Piece]) -> bool:
        if self._scanner is not None:
            return self._scan(self._scanner, pieces)
        if self._in_call:
            return self._begin_scan()
        if self._ended_call and not self._skip_end():
            return False
        return self._pass_text(pieces)

    def _pass_text(self, pieces: list[Piece]) -> bool:
        begin, text = self._format.begin, self._held
        position = text.find(begin)
        if position < 0 and self._format.also_bare and self._at_start and text.lstrip(_SPACE).startswith("{"):
            self._scanner = self._new_scanner()
            return True
        if position >= 0:
            self._give(pieces, text[:position].rstrip(_SPACE))
            self._held, self._raw, self._in_call = text[position + len(begin) :], begin, True
            return True
        keep = _held_back(text, begin)
        self._give(pieces, text[: len(text) - keep])
        self._held = text[len(text) - keep :]
        return False

    def _give(self, pieces: list[Piece], text: str) -> None:
        if text:
            self._at_start = self._ended_call = False
            pieces.append(TextPiece(text))

    def _begin_scan(self) -> bool:
        """After the mark. Mistral's newer models write the name by itself."""
        text = self._held.lstrip(_SPACE)
        if not text:
            return False
        if self._format.name != "mistral" or text[0] in "[{":
            self._scanner, self._in_call = self._new_scanner(), False
            return True
        found = _MISTRAL_NAME_ENDS.search(text)
        if found is not None and found[0] == "[CALL_ID]":
            found = re.compile(r"\[ARGS\]").search(text)
        if found is None and len(text) <= _MAX_NAME_CHARS:
            return False
        name = "" if found is None else text[: found.start()].partition("[CALL_ID]")[0].strip()
        self._in_call = False
        if found is None or name not in self._names:
            self._held, self._raw = self._raw + self._held, ""
            self._scanner = _Failed(self._names, self._format.make_id)
            return True
        rest = text[found.start() if found[0] == "{" else found.end() :]
        self._raw, self._held = self._raw + text[: len(text) - len(rest)], rest
        self._scanner = self._new_scanner(name)
        return True

    def _new_scanner(self, name: str | None = None) -> CallScanner:
        return CallScanner(self._names, self._format.make_id, first_number=self.num_calls, name=name)

    def _scan(self, scanner: CallScanner, pieces: list[Piece]) -> bool:
        found, num_read = scanner.feed(self._held)
        self._raw += self._held[:num_read]
        self._held = self._held[num_read:]
        if self._parallel or self.num_calls == 0:
            pieces += found if self._parallel else [piece for piece in found if isinstance(piece, TextPiece) or piece.number == 0]
        if scanner.failed and not scanner.num_calls:
            # No call after all. Its first character cannot begin another one here, so there is progress.
            self._scanner = None
            self._give(pieces, self._raw or self._held[:1])
            self._held = self._held if self._raw else self._held[1:]
            self._raw = ""
            return True
        if scanner.done or scanner.failed:
            self.num_calls += scanner.num_calls
            self._scanner, self._raw, self._ended_call, self._at_start = None, "", True, self._format.also_bare
            return True
        return False

    def _skip_end(self) -> bool:
        """Past the space and the end mark behind a call; False: it may still come."""
        text = self._held.lstrip(_SPACE + ";" if self._format.also_bare else _SPACE)
        end = self._format.end
        if end and text.startswith(end):
            self._held, self._ended_call = text[len(end) :], bool(text[len(end) :].strip(_SPACE))
            self._held = self._held.lstrip(_SPACE)
            self._ended_call = True
            return bool(self._held)
        if not text or (end and end.startswith(text)):
            return False
        self._held = text
        return True


class _Failed(CallScanner):
    """In place of a scanner where the text behind a mark is no call."""

    def __init__(self, names: Collection[str], make_id: MakeId) -> None:
        super().__init__(names, make_id)
        self.failed = True


def _held_back(text: str, mark: str) -> int:
    """How many of the last characters cannot be given out: they may begin the mark, or be the space before it."""
    keep = next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
    rest = text[: len(text) - keep]
    return keep + len(rest) - len(rest.rstrip(_SPACE))
