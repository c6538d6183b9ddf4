"""One turn of a chat, whatever API asked for it: the prompt with its tools, and an answer of text and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aioengine.outputs import CompletionOutput, RequestOutput
from aioengine.sampling_params import SamplingParams, StructuredOutputsParams
from aioengine.server.answers import FinishReason
from aioengine.server.choices import check_error, finish_reason
from aioengine.server.messages_in import Message
from aioengine.server.protocol import EngineRequest
from aioengine.server.service import Service
from aioengine.server.started import Started
from aioengine.server.tool_calls import AnswerParser, CallStart, Piece, TextPiece
from aioengine.server.tool_formats import HERMES
from aioengine.server.tools import ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """params: builds the parameters of sampling from what the tools change of them."""

    messages: Sequence[Message]
    tools: ToolUse
    params: Callable[[StructuredOutputsParams | None, dict[str, Any]], SamplingParams]
    variables: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """What one continuation has said."""

    texts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, TextPiece):
                self.texts.append(piece.text)
            elif isinstance(piece, CallStart):
                self.calls.append(Call(piece.id, piece.name))
            else:
                self.calls[piece.number].arguments += piece.text


class Turn:
    """A generation that has started, and what turns its texts into pieces of answers."""

    def __init__(self, started: Started, make_parser: Callable[[], AnswerParser]) -> None:
        self.started = started
        self._parsers = [make_parser() for _ in started.first.outputs]
        self._ended: set[int] = set()

    def pieces(self, completion: CompletionOutput, text: str) -> list[Piece]:
        """What the next text of this continuation is."""
        parser = self._parsers[completion.index]
        found = parser.push(text)
        return found + parser.finish() if completion.finished else found

    def finish_reason(self, completion: CompletionOutput) -> FinishReason | None:
        reason = finish_reason(completion)
        return "tool_calls" if reason == "stop" and self._parsers[completion.index].num_calls else reason

    def new(self, output: RequestOutput) -> list[CompletionOutput]:
        """Of a stream of differences: the continuations that say something new. Raises RequestError for a failed request."""
        check_error(output)
        found: list[CompletionOutput] = []
        for completion in output.outputs:
            if completion.index in self._ended or not (completion.text or completion.token_ids or completion.finished):
                continue
            if completion.finished:
                self._ended.add(completion.index)
            found.append(completion)
        return found

    async def last(self) -> tuple[RequestOutput, list[Answer]]:
        """Of a stream that gives the final output only. Raises RequestError for a failed request."""
        output = await self.started.last()
        check_error(output)
        answers: list[Answer] = []
        for completion in output.outputs:
            answer = Answer()
            answer.add(self.pieces(completion, completion.text))
            answers.append(answer)
        return output, answers


async def start_turn(service: Service, turn: TurnRequest, request: EngineRequest, *, request_id: str) -> Turn:
    """Raises InvalidRequestError, RequestError and what the engine raises."""
    tools = turn.tools
    tool_format = HERMES if tools.mode == "none" else await service.prompts.tool_format()
    changes: dict[str, Any] = {"skip_special_tokens": False} if tools.mode == "auto" and tool_format.is_special else {}
    params = turn.params(tools.grammar(), changes)
    prompt = await service.prompts.render(
        turn.messages,
        tools=tools,
        variables=turn.variables,
        add_generation_prompt=turn.add_generation_prompt,
        continue_final_message=turn.continue_final_message,
    )
    started = await service.start(prompt, params, request, request_id=request_id)
    is_held = params.structured_outputs is not None
    return Turn(started, lambda: tools.parser(tool_format, is_held_to_a_grammar=is_held))
