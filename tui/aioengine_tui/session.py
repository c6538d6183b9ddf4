"""What the screens share: the state that they draw, and the request that the user has chosen."""

from __future__ import annotations

from dataclasses import dataclass

from aioengine_tui.model.owner_marks import OwnerMarks
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.why.hindsight import KnownInHindsight


@dataclass(slots=True)
class Answer:
    """A prompt that was sent from here, and what came of it; events show neither unless the engine publishes texts."""

    prompt: str
    text: str = ""
    has_ended: bool = False


class Session:
    """Owned by the app. A paused view draws from a copy; the live state goes on taking in every event."""

    def __init__(self, live: DashboardState) -> None:
        self.live = live
        self._frozen: DashboardState | None = None
        self.selected: str | None = None  # a request id
        self.answers: dict[str, Answer] = {}  # by request id: prompts sent from here, the latest
        self.hindsight = KnownInHindsight()  # of a recording: what running it again has shown
        self.owner_marks = OwnerMarks()  # the colours and letters of requests, alike on every screen

    @property
    def state(self) -> DashboardState:
        """What is drawn."""
        return self._frozen if self._frozen is not None else self.live

    @property
    def is_frozen(self) -> bool:
        return self._frozen is not None

    @property
    def num_events_behind(self) -> int:
        """Events that came since the view was paused."""
        return self.live.num_events - self._frozen.num_events if self._frozen is not None else 0

    def freeze(self) -> None:
        self._frozen = self.live.copy()

    def thaw(self) -> None:
        self._frozen = None
