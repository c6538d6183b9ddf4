"""A client for OpenAI's API that costs little and stamps what arrives before it looks at it.

HTTP/1.1 by hand over asyncio's streams: what a client library does for every event would be measured as the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, SupportsIndex
from urllib.parse import urlsplit

from aioengine.engine.outputs.detokenizer import TextTokenizer
from aioengine.errors import ConfigError
from aioengine_bench.client import Chunk, RequestAborted, RequestFailed
from aioengine_bench.datasets import BenchRequest
from aioengine_bench.specs import KEY_VARIABLE, RemoteSpec, SamplingSpec

_MAX_LINE_BYTES = 8 << 20
_MAX_ERROR_CHARS = 300


@dataclass(slots=True)
class _Head:
    status: int
    headers: dict[str, str] = field(default_factory=dict)


class _StampedReader(asyncio.StreamReader):
    """Knows when the latest bytes came: whoever reads them may have to wait for its turn behind hundreds of others."""

    fed_time = 0.0

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.fed_time = time.perf_counter()
        super().feed_data(data)


class _Connection:
    """One connection, for one request at a time."""

    def __init__(self, reader: _StampedReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.may_be_used_again = True
        self.is_kept = False  # it has had a request before

    async def send(self, data: bytes) -> _Head:
        self.writer.write(data)
        await self.writer.drain()
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        head = _Head(int(first.split(" ", 2)[1]))
        for line in lines:
            name, _, value = line.partition(":")
            head.headers[name.lower()] = value.strip()
        if head.headers.get("connection", "").lower() == "close":
            self.may_be_used_again = False
        return head

    async def parts(self, head: _Head) -> AsyncIterator[bytes]:
        """The pieces of the body, as they come."""
        if head.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self.reader.readline()).split(b";")[0] or b"0", 16):
                data = await self.reader.readexactly(size + 2)
                yield data[:-2]
            await self.reader.readline()
        elif "content-length" in head.headers:
            left = int(head.headers["content-length"])
            while left:
                data = await self.reader.read(min(left, 65536))
                if not data:
                    raise asyncio.IncompleteReadError(b"", left)
                left -= len(data)
                yield data
        else:
            self.may_be_used_again = False
            while data := await self.reader.read(65536):
                yield data


class HttpClient:
    """Streams from a server. Token counts are those of the server's usage; without one each event counts as a token.

    tokenizer: to write prompts as text, for endpoints that take no token ids. The key comes from the environment.
    """

    def __init__(self, remote: RemoteSpec, *, model: str, sampling: SamplingSpec | None = None, tokenizer: TextTokenizer) -> None:
        self._remote = remote
        self._model = model
        self._sampling = sampling or SamplingSpec()
        self._tokenizer = tokenizer
        self._key = os.environ.get(KEY_VARIABLE) or None
        self._idle: list[_Connection] = []

    async def send(self, request: BenchRequest, *, request_id: str) -> AsyncIterator[Chunk]:
        """Raises RequestFailed, RequestAborted, OSError."""
        data = _post(self._remote, self._remote.path, json.dumps(self._body(request)).encode(), self._key, request_id)
        connection = await self._connect()
        try:
            try:
                try:
                    head = await asyncio.wait_for(connection.send(data), self._remote.timeout_s)
                except (asyncio.IncompleteReadError, ConnectionError) as exc:
                    # A server may close a kept connection just as the next request goes out (llama.cpp's does): ask anew.
                    if not connection.is_kept or (isinstance(exc, asyncio.IncompleteReadError) and exc.partial):
                        raise
                    connection.writer.close()
                    connection = await open_connection(self._remote)
                    head = await asyncio.wait_for(connection.send(data), self._remote.timeout_s)
                if head.status != 200:
                    raise RequestFailed(f"HTTP {head.status}: {_error_text(b''.join([part async for part in connection.parts(head)]))}")
                async for chunk in _chunks(connection, head, request):
                    yield chunk
            except (asyncio.IncompleteReadError, ConnectionError) as exc:
                raise RequestFailed(f"the connection broke off: {exc or type(exc).__name__}") from None
        except BaseException:
            connection.may_be_used_again = False
            raise
        finally:
            self._give_back(connection)

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.writer.close()
        for connection in idle:
            with contextlib.suppress(OSError):
                await connection.writer.wait_closed()

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        sampling = self._sampling
        body: dict[str, Any] = {"model": self._model}
        if self._remote.backend == "openai-chat":
            body["messages"] = [{"role": "user", "content": self._text(request.prompt_token_ids)}]
        else:
            body["prompt"] = self._text(request.prompt_token_ids) if self._remote.send_text else list(request.prompt_token_ids)
        body |= {"max_tokens": request.max_tokens, "temperature": sampling.temperature, "seed": sampling.seed, "stream": True}
        body["stream_options"] = {"include_usage": True}
        # What is no part of OpenAI's API is sent only where it changes something.
        if request.ignore_eos:
            body["ignore_eos"] = True
        for name, default in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if (value := getattr(sampling, name)) != default:
                body[name] = value
        return body

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof():
                connection.is_kept = True
                return connection
            connection.writer.close()
        return await open_connection(self._remote)

    def _give_back(self, connection: _Connection) -> None:
        if connection.may_be_used_again:
            self._idle.append(connection)
        else:
            connection.writer.close()


async def open_connection(remote: RemoteSpec) -> _Connection:
    """Connect to the server. Raises OSError."""
    parts = urlsplit(remote.base_url)
    secure = parts.scheme == "https"
    context = ssl.create_default_context() if secure else None
    port = parts.port or (443 if secure else 80)
    loop = asyncio.get_running_loop()
    reader = _StampedReader(limit=_MAX_LINE_BYTES, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.create_connection(lambda: protocol, parts.hostname or "", port, ssl=context)
    return _Connection(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


async def list_models(remote: RemoteSpec) -> list[dict[str, Any]]:
    """What `/v1/models` says. Raises ConfigError if the server cannot be reached or refuses."""
    request = _request(remote, "GET", remote.models_path, os.environ.get(KEY_VARIABLE) or None)
    try:
        connection = await open_connection(remote)
        try:
            head = await asyncio.wait_for(connection.send(request), 30)
            body = b"".join([part async for part in connection.parts(head)])
        finally:
            connection.writer.close()
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as exc:
        raise ConfigError(f"cannot reach {remote.base_url}: {exc or type(exc).__name__}") from exc
    if head.status != 200:
        hint = f" (the key is read from {KEY_VARIABLE})" if head.status in (401, 403) else ""
        raise ConfigError(f"{remote.base_url}{remote.models_path} answers {head.status}: {_error_text(body)}{hint}")
    try:
        return [card for card in json.loads(body)["data"] if isinstance(card, dict)]
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{remote.base_url} does not list its models as OpenAI's API does: {exc}") from exc


async def _chunks(connection: _Connection, head: _Head, request: BenchRequest) -> AsyncIterator[Chunk]:
    """The events that have content. The latest is kept back until the next one comes, as the usage may correct its count."""
    held: Chunk | None = None
    num_tokens = num_cached = 0
    finish_reason: str | None = None
    is_done = False
    async for now, data in _events(connection, head):
        if data == b"[DONE]":
            is_done = True
            continue
        event = _parse(data)
        usage = event.get("usage") or {}
        num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or num_cached
        for choice in event.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            finish_reason = choice.get("finish_reason") or finish_reason
            if text:
                if held is not None:
                    yield held
                held = Chunk(1, text, num_cached, now)
                num_tokens += 1
        # llama.cpp puts the usage into the event that has the finish_reason, others into one of its own.
        is_last = finish_reason is not None or not event.get("choices")
        if held is not None and is_last and isinstance(total := usage.get("completion_tokens"), int):
            held = Chunk(max(0, held.num_tokens + total - num_tokens), held.text, num_cached, held.time)
            num_tokens = total
    if held is not None or finish_reason is not None:
        yield replace(held or Chunk(0), finish_reason=finish_reason)
    if finish_reason is None:
        raise RequestFailed("the stream broke off" if not is_done else "the stream ended without a finish_reason")
    if finish_reason == "abort":
        raise RequestAborted("aborted by the server")
    if (finish_reason == "length" or request.ignore_eos) and num_tokens < request.max_tokens:
        raise RequestFailed(f"cut off: {num_tokens} of {request.max_tokens} tokens, finish_reason {finish_reason!r}")


async def _events(connection: _Connection, head: _Head) -> AsyncIterator[tuple[float, bytes]]:
    """When each event's last byte arrived, and its data."""
    rest = b""
    async for part in connection.parts(head):
        now = connection.reader.fed_time
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now, line[5:].strip()


def _parse(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise RequestFailed(f"an event is no JSON: {data[:80]!r}") from None
    if not isinstance(event, dict):
        raise RequestFailed(f"an event is no object: {data[:80]!r}")
    if event.get("error"):
        raise RequestFailed(f"an error in the stream: {_error_text(data)}")
    return event


def _error_text(body: bytes) -> str:
    try:
        error = json.loads(body)
        error = error.get("error", error)
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, AttributeError):
        text = body.decode(errors="replace")
    return str(text)[:_MAX_ERROR_CHARS]


def _post(remote: RemoteSpec, path: str, body: bytes, key: str | None, request_id: str) -> bytes:
    headers = {"content-type": "application/json", "content-length": str(len(body)), "x-request-id": request_id}
    return _request(remote, "POST", path, key, headers) + body


def _request(remote: RemoteSpec, method: str, path: str, key: str | None, headers: dict[str, str] | None = None) -> bytes:
    lines = {"host": urlsplit(remote.base_url).netloc, "accept": "*/*", **(headers or {})}
    if key is not None:
        lines["authorization"] = f"Bearer {key}"
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1")
