"""Chat templates: Jinja texts that turn messages into a prompt, rendered as transformers renders them.

The environment, and what a template finds in it, are those of `apply_chat_template`
(https://huggingface.co/docs/transformers/chat_templating); the tests compare with it. Templates are other people's code: they
run in Jinja's sandbox, and all that they see is text, numbers, lists and dictionaries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from aioengine.errors import InvalidRequestError

if TYPE_CHECKING:
    import jinja2

# The names under which a message may carry what a model thought; templates read the first, those of gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplates:
    """The templates of a model by name; "default" serves plain chats, "tool_use", if there is one, those with tools.

    variables: what each of them sees besides the chat: bos_token, eos_token and the like.
    """

    def __init__(self, templates: str | Mapping[str, str] | None, *, variables: Mapping[str, str]) -> None:
        self._templates = {"default": templates} if isinstance(templates, str) else dict(templates or {})
        self._variables = dict(variables)
        self._compiled: dict[str, jinja2.Template] = {}  # on the first use: Jinja is not needed for plain prompts

    def __contains__(self, name: str) -> bool:
        return name in self._templates

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> str:
        """Raises InvalidRequestError if no template serves, or if it refuses the messages."""
        name = "tool_use" if tools is not None and "tool_use" in self else "default"
        if name not in self:
            there_are = f"; it has {', '.join(sorted(self._templates))}, but no default" if self._templates else ""
            raise InvalidRequestError(f"the model has no chat template{there_are}; pass the prompt as text or token ids")
        if not messages:
            raise InvalidRequestError("the chat is empty: give at least one message")
        # None is no missing value to a template (`{% if tools is not none %}`): it is passed, as transformers passes it.
        seen = {
            **self._variables,
            **(variables or {}),
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            if name not in self._compiled:
                self._compiled[name] = _environment().from_string(self._templates[name])
            plain = {key: _plain(value) for key, value in seen.items()}
            return self._compiled[name].render(messages=[_plain(_message(message)) for message in messages], **plain)
        except Exception as error:  # the template is other people's code: it may divide by zero, or call itself for ever
            raise InvalidRequestError(f"the chat template refuses these messages: {error}") from error


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without its keys that are None, which many templates would print, and with its reasoning under the usual names."""
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[key] for key in _REASONING if key in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """The value as JSON has it, with nothing that a template could call; what JSON lacks becomes its type's name."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):  # an enum, say: its methods stay behind
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value) if type(value) in (list, tuple) else [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _environment() -> jinja2.Environment:
    """The sandbox and the extras that transformers promises to templates."""
    import jinja2.ext
    import jinja2.sandbox
    import jinja2.utils

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks the assistant's words for training; here its body is just rendered, in a scope of its own."""

        tags = {"generation"}  # noqa: RUF012  (Jinja's own attribute)

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

        def _render(self, caller: Any) -> str:
            return str(caller())

    class Dict:
        """`dict` without what leads out of the sandbox."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args, **kwargs)

    class Namespace(jinja2.utils.Namespace):
        """`namespace` that takes no names which begin with an underscore."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, given = args[0], dict(*args[1:], **kwargs)
            for name in given:
                _check_name(name)
            jinja2.utils.Namespace.__init__(self, given)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda layout: datetime.now().strftime(layout),
        "dict": Dict(),
        "namespace": Namespace,
    }
    return environment


def _check_name(name: object) -> None:
    import jinja2

    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace of a chat template takes no attribute {name!r}")


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
