"""What every endpoint needs: the engine, the body, the model's name, and generation that ends when its client leaves."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from aioengine.engine.async_engine import AsyncEngine
from aioengine.engine.inputs.input_processor import Prompt
from aioengine.engine.outputs.detokenizer import TextTokenizer
from aioengine.errors import AioEngineError, EngineDeadError
from aioengine.printable import get_logger
from aioengine.sampling_params import SamplingParams
from aioengine.server.delivery import Deliveries
from aioengine.server.errors import Problem, RequestError, error_response, problem_of
from aioengine.server.leaving import UntilClientLeaves
from aioengine.server.limits import BodyBudget, check_num_items, check_num_values, read_body
from aioengine.server.metrics import EngineMetrics
from aioengine.server.prompts import ChatPrompts
from aioengine.server.protocol import EngineRequest
from aioengine.server.response_store import ResponseStore
from aioengine.server.settings import ServerSettings
from aioengine.server.started import Started
from aioengine.server.timing import Determinism, timing_headers
from aioengine.server.tracing import RequestTracer
from aioengine.server.turnstile import Turnstile

logger = get_logger(__name__)

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

_MAX_INLINE_CHARS = 4096  # tokenising that many takes about a millisecond
_CLIENT_LEFT = 499  # as nginx says it; nobody is there to read it


class _Answering:
    """A request that is being answered: its headers, and the generations that it has started."""

    __slots__ = ("headers", "started")

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers
        self.started: list[Started] = []


_here: ContextVar[_Answering] = ContextVar("aioengine_answering")


class Service:
    """One engine as HTTP sees it. tracer: writes a span for each generation."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings, *, tracer: RequestTracer | None = None) -> None:
        self._tracer = tracer
        self.engine = engine
        self.settings = settings
        self.start_time = int(time.time())
        self.bodies = BodyBudget(settings.max_total_body_bytes)
        self.deliveries = Deliveries()
        self.turnstile = Turnstile()
        self.num_open = 0  # requests that are being answered, for /load
        self.determinism = Determinism(engine)
        self._metrics: EngineMetrics | None = None
        self._prompts: ChatPrompts | None = None
        self.responses = ResponseStore(max_responses=settings.max_stored_responses)

    @property
    def prompts(self) -> ChatPrompts:
        """Of the engine's tokenizer. Raises RequestError if it has none, AioEngineError before it is started."""
        if self._prompts is None:
            name = self.engine.model_info.name
            self._prompts = ChatPrompts(self.tokenizer, model_name=name, tool_format=self.settings.tool_call_parser)
        return self._prompts

    @property
    def tokenizer(self) -> TextTokenizer:
        """Raises RequestError if the engine works on token ids only, AioEngineError before it is started."""
        name = self.engine.model_info.name
        try:
            return self.engine.tokenizer
        except AioEngineError:
            raise RequestError(400, f"{name} is served without a tokenizer: send token ids to /v1/completions") from None

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(self.settings.served_model_names) or (self.engine.config.model,)

    @property
    def all_model_names(self) -> tuple[str, ...]:
        """With the LoRA adapters, which requests choose as a model. A name of the model's own comes before one of them."""
        return tuple(dict.fromkeys((*self.model_names, *self.engine.lora_names)))

    @property
    def model_name(self) -> str:
        """What answers call the model, unless they come from an adapter."""
        return self.model_names[0]

    def lora_of(self, model: str | None) -> str | None:
        """The adapter that a request's `model` names; None: it names the model."""
        return None if model is None or model in self.model_names else model

    def name_in_answer(self, model: str | None) -> str:
        """What an answer calls what it comes from."""
        return self.lora_of(model) or self.model_name

    def started_metrics(self) -> EngineMetrics:
        """The engine's metrics, which count from the first request on, whatever it asks for."""
        if self._metrics is None:
            self._metrics = EngineMetrics(self.engine, model_name=self.model_name)
            self._metrics.start()
        return self._metrics

    def draining(self) -> Problem | None:
        """What a new request is told while the running ones come to their end."""
        if self.engine.is_draining:
            return Problem(503, "the server is shutting down: it finishes its requests and takes no new ones", "server_error")
        return None

    # ------------------------------------------------------------------ requests in
    async def read(self, request: Request, kind: type[T]) -> T:
        """The body as a `kind`. Raises RequestError for what it cannot be."""
        settings = self.settings
        body = await read_body(request, max_bytes=settings.max_body_bytes, timeout_s=settings.read_timeout_s, budget=self.bodies)
        await self.turnstile.enter()
        check_num_values(body)
        try:
            body.decode()  # fields that are ignored are not looked at below
            value = msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:  # ValidationError is a DecodeError
            text = "the body is nested too deeply" if isinstance(exc, RecursionError) else str(exc)
            raise RequestError(400, f"the body cannot be read: {text}") from None
        check_num_items(value)
        name = getattr(value, "model", None)
        if name is not None and name not in self.all_model_names:
            raise RequestError(404, f"the model {name[:100]!r} is not served here", kind="not_found_error", param="model")
        return value

    # ------------------------------------------------------------------ generation
    async def start(self, prompt: Prompt, params: SamplingParams, request: EngineRequest, *, request_id: str | None = None) -> Started:
        """Submit, and wait for the first output: only now it is known that the request is not refused."""
        if self.settings.log_requests:
            logger.info("prompt %r, %r", prompt, params)
        stream = self.engine.generate(
            prompt,
            params,
            request_id=request_id or request.request_id,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            lora=self.lora_of(request.model),
            timeout=request.timeout,
        )
        try:
            started = Started(await anext(stream), stream, on_end=self._tracing_here())
        except BaseException:
            await stream.aclose()
            raise
        _here.get().started.append(started)
        return started

    def _tracing_here(self) -> Callable[[Started], None] | None:
        """Writes the span of a generation that ends, below the caller's own."""
        tracer = self._tracer
        if tracer is None:
            return None
        headers = _here.get().headers
        return lambda started: tracer.record(started.latest, headers=headers)

    async def start_all(self, starts: list[Coroutine[Any, Any, Started]]) -> list[Started]:
        """All of them, or none: where one is refused the others are aborted."""
        tasks = [asyncio.ensure_future(start) for start in starts]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Started):
                    await result.close()
            raise

    # ------------------------------------------------------------------ answers out
    def endpoint(
        self, kind: type[T], answer: Callable[[T], Coroutine[Any, Any, Response]], respond: Callable[[Problem], Response] = error_response
    ) -> Handler:
        """Reads the body as a `kind` and answers it; errors become responses by `respond` (OpenAI's form, or `anthropic_error`).

        A client that leaves before there is a response cancels the answer, which aborts what it had started.
        """

        async def handle(request: Request) -> Response:
            if (problem := self.draining()) is not None:
                return respond(problem)
            self.num_open += 1
            here = _Answering(request.headers)
            _here.set(here)
            try:
                self.started_metrics()
                self.determinism.start()
                body = await self.read(request, kind)
                with UntilClientLeaves(request.scope, request.receive):
                    response = await answer(body)
                    await self.turnstile.enter()  # many first tokens come with one step
                if here.started:
                    response.headers.update({**timing_headers([one.latest for one in here.started]), **self.determinism.headers()})
                return response
            except ClientDisconnect:
                return Response(status_code=_CLIENT_LEFT)
            except (AioEngineError, RequestError) as exc:
                refused_late = self.draining() if isinstance(exc, EngineDeadError) else None  # it came while the drain began
                return respond(refused_late or problem_of(exc))
            except Exception as exc:
                logger.exception("%s failed", request.url.path)
                return respond(problem_of(exc))
            finally:
                self.num_open -= 1

        return handle


async def off_loop(num_chars: int, work: Callable[[], T]) -> T:
    """Do what takes time with a text of that length: beside the event loop, which has steps to schedule, if it is a long one."""
    return work() if num_chars <= _MAX_INLINE_CHARS else await asyncio.to_thread(work)


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"
