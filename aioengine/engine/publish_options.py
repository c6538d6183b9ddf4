"""Where the user wants an engine's events to go."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """What the user asked for."""

    record: str | Path | None = None  # a file
    events: str | Path | None = None  # a socket's path, tcp:HOST:PORT, or "auto"
    events_token: str | None = field(default=None, repr=False)  # a secret
    allow_events_control: bool = False
    publish_text: bool = False
