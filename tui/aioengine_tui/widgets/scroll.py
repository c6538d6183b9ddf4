"""The cursor and the window of a scrolling list."""

from __future__ import annotations


class ScrollState:
    """Which of `count` rows is under the cursor, and which are visible in a window of `height` rows."""

    def __init__(self, *, follow_end: bool = False) -> None:
        self.cursor = 0
        self.top = 0
        self.follow_end = follow_end  # the cursor stays on the last row until it is moved away from it
        self._count = 0
        self._height = 1
        self._follows = follow_end

    @property
    def is_following(self) -> bool:
        return self._follows

    def fit(self, count: int, height: int) -> range:
        """Take in new sizes and return the visible indices."""
        self._count, self._height = count, max(1, height)
        if self._follows:
            self.cursor = count - 1
        self.cursor = max(0, min(self.cursor, count - 1))
        self._scroll_to_cursor()
        return range(self.top, min(count, self.top + self._height))

    def move(self, delta: int) -> None:
        self.go(self.cursor + delta)

    def page(self, pages: int) -> None:
        self.go(self.cursor + pages * max(1, self._height - 1))

    def go(self, index: int) -> None:
        self.cursor = max(0, min(index, self._count - 1))
        self._follows = self.follow_end and self.cursor >= self._count - 1
        self._scroll_to_cursor()

    def shift(self, rows: int) -> None:
        """The list lost `rows` rows at its beginning: the cursor stays on its row."""
        if not self._follows:
            self.cursor = max(0, self.cursor - rows)
            self.top = max(0, self.top - rows)

    def _scroll_to_cursor(self) -> None:
        self.top = max(0, min(self.top, self._count - self._height))
        if self.cursor < self.top:
            self.top = max(0, self.cursor)
        elif self.cursor >= self.top + self._height:
            self.top = self.cursor - self._height + 1
