"""OpenAI's `/v1/responses`: made, streamed, kept, fetched again, cancelled and deleted."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from aioengine.errors import AioEngineError
from aioengine.outputs import RequestOutput
from aioengine.printable import get_logger
from aioengine.server.errors import RequestError, error_response, json_response, problem_of
from aioengine.server.messages_in import Message, tool_call
from aioengine.server.response_events import ResponseEvents
from aioengine.server.response_store import ResponseStore, StoredResponse
from aioengine.server.responses_in import input_items, messages_of, params_of, tools_of, with_instructions
from aioengine.server.responses_protocol import (
    DeletedResponse,
    InputItems,
    OutputCall,
    OutputMessage,
    ResponseAnswer,
    ResponseError,
    ResponsesRequest,
    TextSettings,
)
from aioengine.server.service import Service, new_id
from aioengine.server.sse import EventStream
from aioengine.server.turn import Turn, TurnRequest, start_turn

logger = get_logger(__name__)


class Responses:
    """Five endpoints and the answers that they share."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.responses

    async def answer(self, request: ResponsesRequest) -> Response:
        """Raises InvalidRequestError, RequestError and what the engine raises, before the status line."""
        items = input_items(request)
        history = self._history(request)
        said = [*history, *messages_of(items)]
        response = _new_answer(request, self._service.name_in_answer(request.model))
        stored = StoredResponse(response, items, said)
        start = partial(self._start, request, response.id, with_instructions(request.instructions, said))
        if request.background:
            return self._in_background(stored, start)
        turn = await start()
        response.status = "in_progress"
        making = _Making(turn, stored, self._store)
        if request.stream:
            return EventStream(self._service, [turn.started], making)
        await making.run()
        if response.error is not None:
            raise RequestError(500, response.error.message, kind="server_error")
        return json_response(response)

    async def _start(self, request: ResponsesRequest, response_id: str, messages: list[Message]) -> Turn:
        turn = TurnRequest(messages=messages, tools=tools_of(request), params=partial(params_of, request))
        return await start_turn(self._service, turn, request, request_id=response_id)

    def _history(self, request: ResponsesRequest) -> list[Message]:
        """What was said before. Raises RequestError."""
        if request.previous_response_id is None:
            return []
        stored = self._store.get(request.previous_response_id)
        if stored is None:
            raise RequestError(
                400,
                f"there is no response {request.previous_response_id[:100]!r}: only the last {self._service.settings.max_stored_responses} "
                "that were stored are kept",
                param="previous_response_id",
            )
        if stored.is_live:
            raise RequestError(400, f"the response {stored.answer.id} is not complete yet", param="previous_response_id")
        return stored.messages

    # ------------------------------------------------------------------ in the background
    def _in_background(self, stored: StoredResponse, start: Any) -> Response:
        """Raises RequestError."""
        response = stored.answer
        if not response.store:
            raise RequestError(400, "background needs store: there is no other way to the answer", param="background")
        response.status = "queued"
        stored.live = asyncio.get_running_loop().create_task(self._make(stored, start), name=f"aioengine-{response.id}")
        self._store.put(stored)
        return json_response(response)

    async def _make(self, stored: StoredResponse, start: Any) -> None:
        response = stored.answer
        try:
            turn = await start()
            response.status = "in_progress"
            await _Making(turn, stored, self._store).run()
        except (AioEngineError, RequestError) as exc:
            response.status = "failed"
            response.error = ResponseError(code="invalid_prompt", message=problem_of(exc).message)
        except Exception as exc:
            logger.exception("%s failed", response.id)
            response.status = "failed"
            response.error = ResponseError(code="server_error", message=problem_of(exc).message)
        finally:
            stored.live = None

    # ------------------------------------------------------------------ those that are kept
    async def show(self, request: Request) -> Response:
        return self._kept(request, lambda stored: json_response(stored.answer))

    async def input_items(self, request: Request) -> Response:
        return self._kept(request, lambda stored: json_response(_listed(stored)))

    async def delete(self, request: Request) -> Response:
        """One that is still being made is cancelled too."""

        def remove(stored: StoredResponse) -> Response:
            self._store.remove(stored.answer.id)
            self._cancel(stored)
            return json_response(DeletedResponse(id=stored.answer.id))

        return self._kept(request, remove)

    async def cancel(self, request: Request) -> Response:
        """Ends one that is still being made, whoever reads it; one that has ended stays what it is."""

        def end(stored: StoredResponse) -> Response:
            self._cancel(stored)
            return json_response(stored.answer)

        return self._kept(request, end)

    def _cancel(self, stored: StoredResponse) -> None:
        if not stored.is_live:
            return
        if stored.live is not None:
            stored.live.cancel()
        self._service.engine.abort(stored.answer.id)
        stored.answer.status, stored.live = "cancelled", None

    def _kept(self, request: Request, respond: Any) -> Response:
        response_id = request.path_params["response_id"]
        stored = self._store.get(response_id)
        if stored is None:
            missing = RequestError(404, f"there is no response {response_id[:100]!r}", kind="not_found_error", param="response_id")
            return error_response(missing.problem)
        answer: Response = respond(stored)
        return answer


class _Making:
    """Makes an answer, which is complete at its end; what it says of that is streamed, or nobody reads it."""

    def __init__(self, turn: Turn, stored: StoredResponse, store: ResponseStore) -> None:
        self._turn = turn
        self._stored = stored
        self._store = store
        self._answer = stored.answer
        self._events = ResponseEvents(stored.answer)

    async def run(self) -> None:
        try:
            self.begin()
            async for output in self._turn.started.outputs():
                self.take(0, output)
            self.end()
        except (AioEngineError, RequestError) as exc:
            self.fail(exc)
        finally:
            self.close()
            await self._turn.started.close()

    def begin(self) -> bytes:
        if self._answer.store:
            self._store.put(self._stored)
        return b"".join(self._events.begin())

    def take(self, index: int, output: RequestOutput) -> bytes:
        """Raises RequestError for a failed request."""
        parts: list[bytes] = []
        for completion in self._turn.new(output):
            parts += self._events.take(output, completion, self._turn.pieces(completion, completion.text))
        return b"".join(parts)

    def end(self) -> bytes:
        return b"".join(self._events.end())

    def fail(self, exc: Exception) -> bytes:
        self._answer.error = ResponseError(code="server_error", message=problem_of(exc).message)
        return self.end()

    def close(self) -> None:
        answer, stored = self._answer, self._stored
        if answer.status in ("queued", "in_progress"):
            answer.status = "cancelled"  # whoever asked for it left, or somebody cancelled it
        if answer.store:
            stored.messages = [*stored.messages, *_said(answer)]
            if self._store.get(answer.id) is stored:
                self._store.put(stored)


def _new_answer(request: ResponsesRequest, model_name: str) -> ResponseAnswer:
    form = None if request.text is None else request.text.format
    settings: dict[str, Any] = {"type": "text"}
    if form is not None and form.type != "text":
        settings = {"type": form.type}
        if form.type == "json_schema":
            settings |= {"name": form.name or "schema", "schema": form.schema, "strict": form.strict, "description": None}
    return ResponseAnswer(
        id=new_id("resp"),
        created_at=int(time.time()),
        model=model_name,
        status="in_progress",
        output=[],
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        text=TextSettings(format=settings),
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=[
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": bool(tool.strict),
            }
            for tool in request.tools or ()
        ],
        metadata=request.metadata or {},
        store=request.store is not False,
        background=bool(request.background),
        user=request.user,
    )


def _said(response: ResponseAnswer) -> list[Message]:
    """The answer as a message of the history."""
    texts = [part.text for item in response.output if isinstance(item, OutputMessage) for part in item.content]
    calls = [tool_call(item.call_id, item.name, item.arguments) for item in response.output if isinstance(item, OutputCall)]
    if not texts and not calls:
        return []
    message: Message = {"role": "assistant", "content": "".join(texts)}
    return [{**message, "tool_calls": calls} if calls else message]


def _listed(stored: StoredResponse) -> InputItems:
    items = [{"id": f"in_{index}", **item} for index, item in enumerate(stored.items)][::-1]
    return InputItems(data=items, first_id=items[0]["id"] if items else None, last_id=items[-1]["id"] if items else None)
