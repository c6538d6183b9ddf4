"""What a request says about tools: which there are, whether one has to be called, and how the answer is held to that."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aioengine.sampling_params import StructuredOutputsParams
from aioengine.server.errors import RequestError
from aioengine.server.tool_calls import AnswerParser, ListedCalls, NamedCall, TextOnly
from aioengine.server.tool_formats import FormattedCalls, ToolFormat

MAX_TOOLS = 512
MAX_NAME_CHARS = 256
_REFERENCES = ("$ref", "$dynamicRef")

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Function:
    """parameters: a JSON schema; None: it takes none."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None

    def schema(self) -> dict[str, Any]:
        """Of the arguments. What is not named in it is left out: a small model would go on inventing more."""
        schema = dict(self.parameters or {"type": "object", "properties": {}})
        if "properties" in schema and "$ref" not in schema:
            schema.setdefault("type", "object")
            if not {"patternProperties", "allOf", "anyOf", "oneOf", "unevaluatedProperties"} & schema.keys():
                schema.setdefault("additionalProperties", False)
        return schema

    def shown(self) -> dict[str, Any]:
        """As chat templates take it."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {"name": self.name, "description": self.description or "", "parameters": parameters}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """functions: those that may be called now. shown: those that the prompt speaks of. parallel: several calls in one answer."""

    mode: Mode = "none"
    functions: Sequence[Function] = ()
    shown: Sequence[Function] = ()
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    def grammar(self) -> StructuredOutputsParams | None:
        """What the whole answer must match; None: the model may say what it likes."""
        if self.mode == "named":
            return StructuredOutputsParams(json=self.functions[0].schema())
        if self.mode == "required":
            return StructuredOutputsParams(json=_calls_schema(self.functions, parallel=self.parallel))
        return None

    def parser(self, tool_format: ToolFormat, *, is_held_to_a_grammar: bool) -> AnswerParser:
        """is_held_to_a_grammar: the answer has a form of its own, so that no call can be in it."""
        if self.mode == "named":
            return NamedCall(self.functions[0].name, tool_format.make_id)
        if self.mode == "required":
            return ListedCalls(self.names, tool_format.make_id)
        if self.mode == "auto" and not is_held_to_a_grammar:
            return FormattedCalls(tool_format, self.names, parallel=self.parallel)
        return TextOnly()


def tool_use(functions: Sequence[Function], mode: Mode, *, parallel: bool, names: Sequence[str] | None = None) -> ToolUse:
    """names: only these of the functions may be called now (None: all). Raises RequestError."""
    if len(functions) > MAX_TOOLS:
        raise RequestError(400, f"there are {len(functions)} tools, at most {MAX_TOOLS} are taken", param="tools")
    known: dict[str, Function] = {}
    for index, function in enumerate(functions):
        if not 0 < len(function.name) <= MAX_NAME_CHARS:
            raise RequestError(400, f"the name of tools[{index}] must have 1 to {MAX_NAME_CHARS} characters", param="tools")
        if function.name in known:
            raise RequestError(400, f"there are two tools of the name {function.name!r}", param="tools")
        known[function.name] = function
    for name in names or ():
        if name not in known:
            raise RequestError(
                400, f"tool_choice names {name[:100]!r}, which is none of the tools: {sorted(known)[:20]}", param="tool_choice"
            )
    chosen = [known[name] for name in dict.fromkeys(names)] if names is not None else list(functions)
    if not chosen:
        if mode in ("required", "named"):
            raise RequestError(400, "tool_choice asks for a call, and there are no tools", param="tool_choice")
        mode = "none"
    shown = () if mode == "none" else tuple(chosen if names is not None and mode != "named" else functions)
    return ToolUse(mode=mode, functions=tuple(chosen), shown=shown, parallel=parallel)


def chat_tool_choice(choice: str | Mapping[str, Any] | None) -> tuple[Mode, list[str] | None]:
    """OpenAI's `tool_choice` of chats -> the mode and the names that it allows (None: all). Raises RequestError."""
    if choice is None:
        return "auto", None
    if choice in ("none", "auto", "required"):
        return choice, None  # type: ignore[return-value]
    if isinstance(choice, Mapping):
        function = choice.get("function")
        # The Responses API has the name beside the type.
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        if choice.get("type") == "function" and isinstance(name, str):
            return "named", [name]
        if choice.get("type") == "allowed_tools":
            return _allowed_tools(choice)
    raise RequestError(
        400, f'tool_choice must be "none", "auto", "required" or name a function, got {json.dumps(choice)[:100]}', param="tool_choice"
    )


def _allowed_tools(choice: Mapping[str, Any]) -> tuple[Mode, list[str]]:
    allowed = choice.get("allowed_tools", choice)
    tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    names: list[str] = []
    for tool in tools if isinstance(tools, list) else ():
        _, name = chat_tool_choice(tool if isinstance(tool, Mapping) and tool.get("type") == "function" else "?")
        names += name or ()
    if mode not in ("auto", "required") or not names:
        raise RequestError(400, 'allowed_tools needs a mode, "auto" or "required", and a list of tools', param="tool_choice")
    return mode, names


def _calls_schema(functions: Sequence[Function], *, parallel: bool) -> dict[str, Any]:
    """A list of calls. Each function's schema lies under `$defs`, and its own references point there."""
    items = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "arguments": {"$ref": f"#/$defs/tool_{index}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, function in enumerate(functions)
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": items},
        "$defs": {f"tool_{index}": _moved(function.schema(), f"#/$defs/tool_{index}") for index, function in enumerate(functions)},
    }
    if not parallel:
        schema["maxItems"] = 1
    return schema


def _moved(value: Any, root: str) -> Any:
    """A schema whose references to its own root find it at `root`. Bodies are not deep: they came through a JSON decoder."""
    if isinstance(value, Mapping):
        return {key: root + item[1:] if _points_to_root(key, item) else _moved(item, root) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, root) for item in value]
    return value


def _points_to_root(key: str, item: Any) -> bool:
    return key in _REFERENCES and isinstance(item, str) and (item == "#" or item.startswith("#/"))
