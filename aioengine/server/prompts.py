"""From messages to a prompt: the chat template with its tools, beside the event loop where that takes long."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from aioengine.engine.inputs.input_processor import TextPrompt
from aioengine.engine.outputs.detokenizer import TextTokenizer
from aioengine.errors import InvalidRequestError
from aioengine.server.errors import RequestError
from aioengine.server.messages_in import Message
from aioengine.server.tool_formats import FORMATS, ToolFormat, detect_format, write_calls, write_result, write_tools
from aioengine.server.tools import ToolUse

# What a template does in about a millisecond; more goes to a thread.
_MAX_INLINE_CHARS = 4096
_MAX_INLINE_MESSAGES = 64


class ChatPrompts:
    """Of one tokenizer. tool_format: the name of a format, None: found out from the template when tools first come."""

    def __init__(self, tokenizer: TextTokenizer, *, model_name: str, tool_format: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._format_name = tool_format
        self._format: ToolFormat | None = None

    async def tool_format(self) -> ToolFormat:
        if self._format is None:
            found = await asyncio.to_thread(detect_format, self._tokenizer)
            if self._format_name is not None:
                named = FORMATS[self._format_name]
                found = dataclasses.replace(named, is_native=found.is_native, shows_history=found.shows_history)
            self._format = found
        return self._format

    async def render(
        self,
        messages: Sequence[Message],
        *,
        tools: ToolUse | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> TextPrompt:
        """The text that the model goes on from. Raises InvalidRequestError for what the template refuses, and RequestError."""
        if not self._tokenizer.has_chat_template:
            raise InvalidRequestError(f"{self._model_name} has no chat template: use /v1/completions with a text or token ids")
        if continue_final_message and messages[-1]["role"] != "assistant":
            raise RequestError(400, "continue_final_message needs a last message of the assistant", param="continue_final_message")
        shown = [function.shown() for function in tools.shown] if tools is not None else []
        if shown or any("tool_calls" in message or message["role"] == "tool" for message in messages):
            messages, shown = adapt(messages, shown, await self.tool_format())

        def work() -> TextPrompt:
            add = add_generation_prompt and not continue_final_message
            text = self._apply(messages, tools=shown, variables=variables, add_generation_prompt=add)
            if continue_final_message:
                final = messages[-1]["content"].strip()
                text = text[: text.rindex(final) + len(final)]
            return TextPrompt(text, add_special_tokens=False)  # the template writes its own

        is_short = len(messages) <= _MAX_INLINE_MESSAGES and not shown and sum(len(m["content"]) for m in messages) <= _MAX_INLINE_CHARS
        return work() if is_short else await asyncio.to_thread(work)

    def _apply(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
        add_generation_prompt: bool,
    ) -> str:
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        # Only what is asked for: a tokenizer of the user's own may know less.
        if tools:
            options["tools"] = tools
        if variables:
            options["variables"] = variables
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except InvalidRequestError:
            raise
        except Exception as exc:  # templates refuse conversations (two user turns, an unknown role) with their own exceptions
            raise InvalidRequestError(f"the chat template refused the messages: {exc}") from exc


def adapt(messages: Sequence[Message], tools: list[dict[str, Any]], tool_format: ToolFormat) -> tuple[list[Message], list[dict[str, Any]]]:
    """Messages and tools as the template takes them: what it knows nothing of is written into the text."""
    adapted = [dict(message) for message in messages]
    if tool_format.name == "mistral":
        for message in adapted:  # its templates refuse other lengths
            _shorten_ids(message)
    if not tool_format.shows_history:
        adapted = [_as_text(message) for message in adapted]
    if tools and not tool_format.is_native:
        words = write_tools(tools)
        if adapted[0]["role"] == "system":
            adapted[0]["content"] = f"{adapted[0]['content']}\n\n{words}" if adapted[0]["content"] else words
        else:
            adapted.insert(0, {"role": "system", "content": words})
        tools = []
    return adapted, tools


def _shorten_ids(message: Message) -> None:
    if "tool_calls" in message:
        message["tool_calls"] = [{**call, "id": call["id"][-9:].rjust(9, "0")} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        message["tool_call_id"] = message["tool_call_id"][-9:].rjust(9, "0")


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": write_result(message["content"])}
    if calls := message.get("tool_calls"):
        return {"role": message["role"], "content": "\n".join(text for text in (message["content"], write_calls(calls)) if text)}
    return message
