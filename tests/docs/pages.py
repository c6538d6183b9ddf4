"""The pages that users read, and what stands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"(?:<!-- needs: (?P<needs>[a-z ]+) -->\n)?^```(?P<language>[a-z]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_SNIPPET = "--8<--"
NOT_CODE = ("text", "")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. needs: what `<!-- needs: ... -->` in front of it says."""

    page: Path
    line: int  # of its fence, from 1
    language: str
    text: str
    needs: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """All blocks in these languages; of all of them if none is named. Files that are shown (snippets) have tests of their own."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start("language")) + 1
            block = Block(page, line, match["language"], match["text"], match["needs"] or "")
            if (not languages or block.language in languages) and not block.text.startswith(_SNIPPET):
                found.append(block)
    return found


def commands(block: Block) -> list[list[str]]:
    """The words of each command of a shell block, comments left out."""
    joined = block.text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def aioengine_commands(block: Block) -> list[list[str]]:
    """The arguments of each `aioengine ...` of a shell block, also behind a pipe or `&&`."""
    found = []
    for words in commands(block):
        while "aioengine" in words:
            words = words[words.index("aioengine") + 1 :]
            end = next((i for i, word in enumerate(words) if word in ("|", "&&", "&", ">")), len(words))
            found.append(words[:end])
            words = words[end:]
    return found
