"""Answers of `/v1/responses` that are kept for a while: a bounded number of them, and of their bytes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from aioengine.server.messages_in import Message
from aioengine.server.responses_protocol import ResponseAnswer

MAX_STORED_BYTES = 64 << 20
_ITEM_BYTES = 500  # about what an entry takes beside its texts


@dataclass(slots=True)
class StoredResponse:
    """messages: the whole conversation, the answer included once there is one. live: the task that still makes it."""

    answer: ResponseAnswer
    items: list[dict[str, Any]]
    messages: list[Message]
    live: asyncio.Task[None] | None = field(default=None)

    @property
    def is_live(self) -> bool:
        return self.answer.status in ("queued", "in_progress")

    def num_bytes(self) -> int:
        return _ITEM_BYTES + sum(map(_size, (self.messages, self.items, self.answer.instructions or "")))


class ResponseStore:
    """The oldest go first. Those that are still being made are not dropped: the engine bounds how many there are."""

    def __init__(self, *, max_responses: int, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def ids(self) -> list[str]:
        """Oldest first."""
        return list(self._stored)

    def get(self, response_id: str) -> StoredResponse | None:
        found = self._stored.get(response_id)
        return None if found is None else found[0]

    def put(self, stored: StoredResponse) -> None:
        """Add it, or count it anew after it has changed."""
        self.remove(stored.answer.id)
        size = stored.num_bytes()
        self._stored[stored.answer.id] = (stored, size)
        self._num_bytes += size
        for response_id in [key for key, (other, _) in self._stored.items() if not other.is_live]:
            if len(self._stored) <= self._max_responses and self._num_bytes <= self._max_bytes:
                break
            self.remove(response_id)

    def remove(self, response_id: str) -> StoredResponse | None:
        found = self._stored.pop(response_id, None)
        if found is None:
            return None
        self._num_bytes -= found[1]
        return found[0]


def _size(value: Any) -> int:
    """About how many bytes. Bodies are not deep: they came through a JSON decoder."""
    if isinstance(value, str):
        return len(value) + 50
    if isinstance(value, dict):
        return 100 + sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, list):
        return 60 + sum(map(_size, value))
    return 30
