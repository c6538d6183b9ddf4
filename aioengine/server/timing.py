"""Why a request took as long as it did, for the one who asked: in the headers of an answer, in the usage of a stream."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from aioengine.engine.async_engine import AsyncEngine
from aioengine.outputs import RequestMetrics, RequestOutput

_MAX_HASHED_BYTES = 16 << 30
_HASH_BLOCK = 1 << 22


class Timing(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Milliseconds. waits_ms: what the queue was for, by reason (see `RequestMetrics`)."""

    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    preempted_ms: float = 0.0
    waits_ms: dict[str, float] = {}


def timing(metrics: RequestMetrics) -> Timing:
    return Timing(
        queue_ms=_ms(metrics.queue_seconds),
        prefill_ms=_ms(metrics.prefill_seconds),
        decode_ms=_ms(metrics.decode_seconds),
        preempted_ms=_ms(metrics.preempted_seconds) or 0.0,
        waits_ms={reason: ms for reason, seconds in metrics.waits.items() if (ms := _ms(seconds))},
    )


def slowest(outputs: Sequence[RequestOutput]) -> RequestOutput | None:
    """Of the prompts of one call, the one that it waited for."""
    return max(outputs, key=lambda output: output.metrics.finished_time or output.metrics.first_token_time or 0.0, default=None)


def timing_headers(outputs: Sequence[RequestOutput]) -> dict[str, str]:
    """Of a stream they are made at its first token: the rest is in its usage."""
    output = slowest(outputs)
    if output is None:
        return {}
    found = timing(output.metrics)
    headers = {"x-aioengine-request-id": outputs[0].request_id} if _is_plain(outputs[0].request_id) else {}
    for name in ("queue", "prefill", "decode", "preempted"):
        value = getattr(found, f"{name}_ms")
        if value is not None:
            headers[f"x-aioengine-{name}-ms"] = f"{value:g}"
    for reason, value in found.waits_ms.items():
        headers[f"x-aioengine-wait-{reason.replace('_', '-')}-ms"] = f"{value:g}"
    return headers


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _is_plain(text: str) -> bool:
    """It may stand in a header: ids are the client's own, and hold what they like."""
    return text.isascii() and text.isprintable() and len(text) <= 256


class Determinism:
    """What the bits of an answer depend on, where they do not depend on what else the engine computes at the time.

    That is so on CPU with weights as they are stored. The digest of the model's files is made once, in a thread.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._header: str | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._find(), name="aioengine-digest")

    def headers(self) -> dict[str, str]:
        return {} if self._header is None else {"x-aioengine-deterministic": self._header}

    async def _find(self) -> None:
        worker, info = self._engine.resolved_config.worker, self._engine.model_info
        if worker.device != "cpu" or worker.weights == "dense" or not info.path:
            return
        digest = await asyncio.to_thread(_digest_of_model, self._engine.config.model)
        isa = await asyncio.to_thread(_isa)
        self._header = f"weights={worker.weights}; isa={isa}; model=sha256:{digest}"


def _digest_of_model(name: str) -> str:
    from aioengine.models.info import resolve_model

    return digest_of(resolve_model(name).weights)


def digest_of(weights: Sequence[Path]) -> str:
    """Of files, by name and contents."""
    files = sorted(weights, key=lambda path: path.name)
    if sum(path.stat().st_size for path in files) > _MAX_HASHED_BYTES:
        return "too-large"
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while block := file.read(_HASH_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _isa() -> str:
    from aioengine_kernels.cpu.library import choose_isa

    return str(choose_isa())
