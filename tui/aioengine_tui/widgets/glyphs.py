"""A letter or a fill for every state, so that none is told by colour alone.

All are one cell wide in every terminal: East Asian "ambiguous" characters, which some terminals draw two cells wide, are
avoided where a plain letter will do.
"""

from __future__ import annotations

STATE_LETTERS: dict[str, str] = {"waiting": "W", "running": "R", "preempted": "P", "cleaning_up": "C", "finished": "F"}

# How a request takes part in a step: a letter in tables, a fill in bars.
KIND_LETTERS: dict[str, str] = {"prefill": "p", "chunk": "c", "decode": "d", "resumed": "r"}
KIND_FILLS: dict[str, str] = {"prefill": "█", "chunk": "▓", "decode": "▒", "resumed": "▚"}
NOTHING = "·"

# What a request did in a step of the waterfall; a waiting one shows the letter of the reason instead.
CELL_GLYPHS: dict[str, str] = {
    "none": " ", "waiting": "·", "preempted": "!", "idle": "-", "decode": "▒", "draft": "2", "chunk": "▓", "prefill": "█",
    "resumed": "▚", "ended": "x", "aborted": "X", "mixed": "▌",
}  # fmt: skip

LANE_FILLS: dict[str, str] = {"schedule": "▚", "execute": "█", "sample": "▓", "update": "▒"}

BLOCK_WORDS: dict[str, str] = {"free_cached": "free cached", "allocated": "taken"}
"""What is written for a state of blocks that is not called by its own name."""
BLOCK_GLYPHS: dict[str, str] = {"empty": "·", "free_cached": "░", "used": "█", "shared": "▓", "allocated": "+", "released": "-"}
EIGHTHS = " ▁▂▃▄▅▆▇█"
LIT = "#"  # a block of the selected request
PLACE = "»"  # in front of the place of a free block in the order of eviction
EVICTED = "x"  # a block whose cached content was just lost to a new owner
