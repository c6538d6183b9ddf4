"""`/v1/embeddings`: one vector for each text."""

from __future__ import annotations

import base64
import struct

from starlette.responses import Response

from aioengine.server.answers import Embedding, Embeddings, EmbeddingUsage
from aioengine.server.completions import read_prompts
from aioengine.server.errors import RequestError, json_response
from aioengine.server.protocol import EmbeddingRequest
from aioengine.server.service import Service


class EmbeddingsEndpoint:
    """One endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def answer(self, request: EmbeddingRequest) -> Response:
        """Raises InvalidRequestError, RequestError and what the engine raises."""
        if (lora := self._service.lora_of(request.model)) is not None:
            raise RequestError(400, f"{lora!r:.300} is a LoRA adapter: embeddings come from the model itself", param="model")
        prompts = read_prompts(request.input, add_special_tokens=request.add_special_tokens is not False, field="input")
        if request.dimensions is not None:
            raise RequestError(400, "dimensions is not supported: vectors have the model's own length", param="dimensions")
        outputs = await self._service.engine.embed(
            prompts,
            pooling="mean" if request.pooling is None else request.pooling,
            normalize=request.normalize is not False,
        )
        as_text = request.encoding_format == "base64"
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return json_response(
            Embeddings(
                model=self._service.model_name,
                data=[
                    Embedding(index=index, embedding=_as_base64(output.embedding) if as_text else output.embedding)
                    for index, output in enumerate(outputs)
                ],
                usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
            )
        )


def _as_base64(vector: list[float]) -> str:
    """The numbers as float32 in little-endian order, which is what OpenAI's clients ask for."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
