"""What the screens tell the app."""

from __future__ import annotations

from textual.message import Message


class OpenRequest(Message):
    """Show the page of a request."""

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self.request_id = request_id


class OpenFrame(Message):
    """Show a step in full: what was sent, and what the worker makes of it."""

    def __init__(self, step_id: int) -> None:
        super().__init__()
        self.step_id = step_id


class OpenPrefixTree(Message):
    """Show which prefixes the KV cache holds."""


class FilterWanted(Message):
    """The user wants to type a filter for this screen."""

    def __init__(self, current: str) -> None:
        super().__init__()
        self.current = current


class SortWanted(Message):
    """The user wants to type the name of a column to sort by."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
