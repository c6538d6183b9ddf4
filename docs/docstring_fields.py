"""How the docstrings of this project become Markdown: a line `name: what it is` is an entry of a list.

An extension of griffe, which reads the sources for mkdocstrings.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"((?:\*{0,2}[a-z_]+)(?:, [a-z_]+)*): (?=\S)")


class FieldLists(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)


def as_list(text: str) -> str:
    """The text with its entries as a list; their further lines are indented already."""
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        entry = _ENTRY.match(line)
        if entry:
            if not in_list and lines and lines[-1]:
                lines.append("")
            line = f"- `{entry[1]}`: {line[entry.end() :]}"
        elif in_list and line and not line.startswith(" "):
            line = "\n" + line  # a paragraph of its own again
        in_list = bool(entry) or (in_list and (not line or line.startswith(" ")))
        lines.append(line)
    return "\n".join(lines)
