"""What is served, how it is doing, and text to tokens and back."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from aioengine import __version__
from aioengine.errors import AioEngineError
from aioengine.server.choices import token_text
from aioengine.server.errors import Problem, RequestError, error_response, json_response
from aioengine.server.messages_in import chat_messages
from aioengine.server.protocol import DetokenizeRequest, TokenizeRequest
from aioengine.server.service import Service


class Models:
    """The endpoints that generate nothing."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card(name) for name in self._service.model_names]})

    async def show(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._service.model_names:
            return error_response(Problem(404, f"the model {name[:100]!r} is not served here", "not_found_error", "model"))
        return json_response(self._card(name))

    def _card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._service.start_time,
            "owned_by": "aioengine",
            "root": self._service.engine.config.model,
            "parent": None,
            "max_model_len": self._service.engine.resolved_config.scheduler.max_model_len,
        }

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
        return json_response({"version": __version__})

    async def load(self, request: Request) -> Response:
        stats = self._service.engine.stats()
        return json_response({"server_load": self._service.num_open, "running": stats.num_running_reqs, "waiting": stats.num_waiting_reqs})

    async def metrics(self, request: Request) -> Response:
        """What Prometheus scrapes."""
        content, media_type = self._service.started_metrics().render(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": media_type})

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """In a thread: a long text takes long, and the loop has steps to schedule."""
        return await asyncio.to_thread(self._tokenize, body)

    def _tokenize(self, body: TokenizeRequest) -> Response:
        tokenizer = self._service.engine.tokenizer
        if (body.prompt is None) == (body.messages is None):
            raise RequestError(400, "give either prompt or messages", param="prompt")
        if body.messages is not None:
            text = tokenizer.apply_chat_template(
                chat_messages(body.messages), add_generation_prompt=body.add_generation_prompt is not False
            )
            token_ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            assert body.prompt is not None
            token_ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        texts = [token_text(tokenizer, token_id) for token_id in token_ids] if body.return_token_strs else None
        max_model_len = self._service.engine.resolved_config.scheduler.max_model_len
        return json_response({"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": texts})

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        return await asyncio.to_thread(self._detokenize, body)

    def _detokenize(self, body: DetokenizeRequest) -> Response:
        vocab_size = self._service.engine.model_info.vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                raise RequestError(400, f"token id {token_id} is not in the vocabulary of {vocab_size} ids", param="tokens")
        return json_response({"prompt": self._service.engine.tokenizer.decode(body.tokens, skip_special_tokens=False)})
