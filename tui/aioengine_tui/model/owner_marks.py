"""A colour and a letter for each request that holds KV blocks, the same for as long as it lives."""

from __future__ import annotations

import string
from collections.abc import Container
from dataclasses import dataclass

NUM_OWNER_COLOURS = 12
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class OwnerMark:
    """How a request's blocks look."""

    request_id: str
    colour: int  # 0 to NUM_OWNER_COLOURS - 1
    letter: str


class OwnerMarks:
    """Deals marks in the order of asking. With more requests than marks, some look alike."""

    def __init__(self) -> None:
        self._marks: dict[str, OwnerMark] = {}
        self._num_dealt = 0

    def of(self, request_id: str) -> OwnerMark:
        mark = self._marks.get(request_id)
        if mark is None:
            number = self._num_dealt
            mark = self._marks[request_id] = OwnerMark(request_id, number % NUM_OWNER_COLOURS, _LETTERS[number % len(_LETTERS)])
            self._num_dealt += 1
        return mark

    def forget_all_but(self, live: Container[str]) -> None:
        """Requests that have ended need no mark any more; a few thousand are kept all the same, for going back in a recording."""
        if len(self._marks) > _MAX_REMEMBERED:
            self._marks = {request_id: mark for request_id, mark in self._marks.items() if request_id in live}
