"""The events that `/v1/responses` streams: what a client needs to build the same answer as the one that is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from aioengine.outputs import CompletionOutput, RequestOutput
from aioengine.server.choices import UsageSoFar
from aioengine.server.responses_protocol import (
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputCall,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ResponseAnswer,
    ResponsesUsage,
)
from aioengine.server.service import new_id
from aioengine.server.sse import event
from aioengine.server.tool_calls import CallStart, Piece, TextPiece


class ResponseEvents:
    """Builds the output of `response`, item by item, and says each change as an event."""

    def __init__(self, response: ResponseAnswer) -> None:
        self._response = response
        self._counts = UsageSoFar()
        self._number = 0
        self._texts: list[str] = []  # of the item that is open
        self._is_open = False
        self._finish_reason: str | None = None

    def begin(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def take(self, output: RequestOutput, completion: CompletionOutput, pieces: Sequence[Piece]) -> Iterator[bytes]:
        self._counts.add(output)
        for piece in pieces:
            yield from self._take_piece(piece)
        if completion.finished:
            self._finish_reason = completion.finish_reason

    def end(self) -> Iterator[bytes]:
        """Closes the item that is open, and the response by how it went."""
        response = self._response
        is_whole = self._finish_reason not in (None, "length", "abort")
        if not response.output and response.error is None:
            yield from self._open_message()  # an answer without a word is still an answer
        yield from self._close("completed" if is_whole else "incomplete")
        response.usage = self._usage()
        if response.error is not None:
            response.status = "failed"
        elif self._finish_reason == "abort":
            response.status = "cancelled"
        elif self._finish_reason == "length":
            response.status, response.incomplete_details = "incomplete", IncompleteDetails(reason="max_output_tokens")
        else:
            response.status, response.completed_at = "completed", int(time.time())
        # There is no event for a response that was cancelled: it ends incomplete for who reads it.
        kind = "incomplete" if response.status == "cancelled" else response.status
        yield self._event(f"response.{kind}", response=response)

    # ------------------------------------------------------------------ items
    def _take_piece(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, CallStart):
            yield from self._close("completed")
            call = OutputCall(id=new_id("fc"), call_id=piece.id, name=piece.name, arguments="", status="in_progress")
            self._response.output.append(call)
            self._is_open = True
            yield self._event("response.output_item.added", output_index=self._index, item=call)
            return
        if isinstance(piece, TextPiece):
            if not self._is_open or isinstance(self._item, OutputCall):
                yield from self._close("completed")
                yield from self._open_message()
            kind, where = "response.output_text.delta", {"content_index": 0, "logprobs": []}
        else:
            kind, where = "response.function_call_arguments.delta", {}
        self._texts.append(piece.text)
        yield self._event(kind, item_id=self._item.id, output_index=self._index, delta=piece.text, **where)

    def _open_message(self) -> Iterator[bytes]:
        message = OutputMessage(id=new_id("msg"), status="in_progress", content=[])
        self._response.output.append(message)
        self._is_open = True
        yield self._event("response.output_item.added", output_index=self._index, item=message)
        part = OutputText(text="")
        message.content.append(part)
        yield self._event("response.content_part.added", item_id=message.id, output_index=self._index, content_index=0, part=part)

    def _close(self, status: ItemStatus) -> Iterator[bytes]:
        if not self._is_open:
            return
        self._is_open = False
        item, text, self._texts = self._item, "".join(self._texts), []
        item.status = status
        where: dict[str, Any] = {"item_id": item.id, "output_index": self._index}
        if isinstance(item, OutputCall):
            item.arguments = text
            yield self._event("response.function_call_arguments.done", **where, name=item.name, arguments=text)
        else:
            part = item.content[0]
            part.text = text
            yield self._event("response.output_text.done", **where, content_index=0, text=text, logprobs=[])
            yield self._event("response.content_part.done", **where, content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._response.output) - 1

    @property
    def _item(self) -> OutputMessage | OutputCall:
        return self._response.output[-1]

    def _usage(self) -> ResponsesUsage:
        usage = self._counts.usage()
        return ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens_details=OutputTokensDetails(),
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        """Encoded at once, so that it says what is so now."""
        number = self._number
        self._number += 1
        return event({"type": kind, "sequence_number": number, **fields}, name=kind)
