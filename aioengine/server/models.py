"""What is served, how it is doing, and text to tokens and back."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from aioengine import __version__
from aioengine.engine.inputs.input_processor import encode
from aioengine.errors import AioEngineError
from aioengine.server.answers import Load, ModelCard, ModelList, Text, Tokens, Version
from aioengine.server.chat import functions_of
from aioengine.server.errors import Problem, RequestError, error_response, json_response
from aioengine.server.messages_in import chat_messages
from aioengine.server.protocol import DetokenizeRequest, TokenizeRequest
from aioengine.server.service import Service, off_loop
from aioengine.server.tools import tool_use


class Models:
    """The endpoints that generate nothing."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, request: Request) -> Response:
        return json_response(ModelList(data=[self._card(name) for name in self._service.all_model_names]))

    async def show(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._service.all_model_names:
            return error_response(Problem(404, f"the model {name[:100]!r} is not served here", "not_found_error", "model"))
        return json_response(self._card(name))

    def _card(self, name: str) -> ModelCard:
        root = self._service.engine.config.model
        return ModelCard(id=name, created=self._service.start_time, root=root, max_model_len=self._max_model_len)

    @property
    def _max_model_len(self) -> int:
        return self._service.engine.resolved_config.scheduler.max_model_len

    async def health(self, request: Request) -> Response:
        """200 while requests are taken; 503 once the engine is dead or drains."""
        if (problem := self._service.draining()) is not None:
            return error_response(problem)
        try:
            self._service.engine.check_health()
        except AioEngineError as exc:
            return error_response(Problem(503, str(exc), "server_error"))
        return Response(b"")

    async def version(self, request: Request) -> Response:
        return json_response(Version(version=__version__))

    async def load(self, request: Request) -> Response:
        stats = self._service.engine.stats()
        return json_response(Load(server_load=self._service.num_open, running=stats.num_running_reqs, waiting=stats.num_waiting_reqs))

    async def metrics(self, request: Request) -> Response:
        """What Prometheus scrapes."""
        content, media_type = self._service.started_metrics().render()
        return Response(content, headers={"content-type": media_type})

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Raises RequestError and InvalidRequestError."""
        if (body.prompt is None) == (body.messages is None):
            raise RequestError(400, "give either prompt or messages", param="prompt")
        if body.messages is not None:
            prompt = await self._service.prompts.render(
                chat_messages(body.messages),
                tools=tool_use(functions_of(body.tools), "auto", parallel=True),
                variables=body.chat_template_kwargs,
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=bool(body.continue_final_message),
            )
            text, add_special_tokens = prompt.text, bool(body.add_special_tokens)
        else:
            assert body.prompt is not None
            text, add_special_tokens = body.prompt, body.add_special_tokens is not False
        work = partial(self._tokens, text, add_special_tokens=add_special_tokens, with_texts=bool(body.return_token_strs))
        return json_response(await off_loop(len(text), work))

    def _tokens(self, text: str, *, add_special_tokens: bool, with_texts: bool) -> Tokens:
        tokenizer = self._service.tokenizer
        token_ids = encode(tokenizer, text, add_special_tokens=add_special_tokens)
        texts = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in token_ids] if with_texts else None
        return Tokens(count=len(token_ids), max_model_len=self._max_model_len, tokens=token_ids, token_strs=texts)

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """Raises RequestError."""
        vocab_size = self._service.engine.model_info.vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                raise RequestError(400, f"token id {token_id} is not in the vocabulary of {vocab_size} ids", param="tokens")
        work = partial(self._service.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response(Text(prompt=await off_loop(len(body.tokens), work)))
