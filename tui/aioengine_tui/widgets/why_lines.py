"""What `model/why` found, as lines: the advice for the engine, and what there is to say of one request."""

from __future__ import annotations

from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.state_data import StateData
from aioengine_tui.model.why.hindsight import KnownInHindsight
from aioengine_tui.model.why.words import advice_line, request_words
from aioengine_tui.widgets.text import Line, Part, clean, fit_line, rule, wrap, wrap_to

_ADVICE_S = 2.0


class Advisor:
    """The advice for one view, looked for every two seconds of the engine's clock: it is about thousands of steps."""

    def __init__(self, hindsight: KnownInHindsight | None = None) -> None:
        self._hindsight = hindsight if hindsight is not None else KnownInHindsight()
        self._num_notes = 0
        self._words: str | None = None
        self._known_for: tuple[StateData, int] | None = None  # what was folded, another object after a seek; how long it may be
        self._time = 0.0  # of the engine's clock

    def line(self, state: DashboardState, *, most: int) -> str | None:
        """As `advice_line`."""
        known, num_notes = self._known_for, self._hindsight.num_notes
        is_known = known is not None and known[0] is state.data and known[1] == most and num_notes == self._num_notes
        if not is_known or state.now - self._time >= _ADVICE_S:
            self._known_for, self._time, self._num_notes = (state.data, most), state.now, num_notes
            self._words = advice_line(state, most=most, known=self._hindsight)
        return self._words


def advice_lines(advisor: Advisor, state: DashboardState, width: int, *, num_lines: int) -> list[Line]:
    """At most `num_lines`, brief where the whole advice is longer than that; none as long as there is nothing to say."""
    words = advisor.line(state, most=(width - 8) * num_lines)
    if words is None:
        return []
    lines = wrap_to(clean(words), max(10, width - 8), num_lines)
    heads = ["advice  ", *["        "] * (len(lines) - 1)]
    return [fit_line([Part(head, "muted"), Part(line, "accent")], width) for head, line in zip(heads, lines, strict=True)]


def why_section(state: DashboardState, request_id: str, width: int) -> list[Line]:
    """A heading and the sentences on why a request waits, or on its slowest token; nothing where there are none."""
    sentences = request_words(state, request_id)
    if not sentences:
        return []
    lines = [rule("why", width)]
    for sentence in sentences:
        wrapped = wrap(clean(sentence), max(10, width - 2))
        lines += [fit_line([Part("> " if index == 0 else "  ", "accent"), Part(line)], width) for index, line in enumerate(wrapped)]
    return lines
