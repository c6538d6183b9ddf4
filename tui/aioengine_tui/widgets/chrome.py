"""The frame around every screen: title, tabs, warnings, and the keys."""

from __future__ import annotations

from collections.abc import Sequence

from aioengine_tui.model.state import DashboardState
from aioengine_tui.session import Session
from aioengine_tui.widgets.text import Line, Part, beside, clean, fit_line, fit_middle, line_text, seconds, width_of

# A sign and a role for each state of the connection.
_STATUS_LOOKS = {
    "connecting": ("~ connecting", "warn"),
    "live": ("* live", "good"),
    "lost": ("! lost, reconnecting", "alert"),
    "ended": ("= ended", "warn"),
    "paused": ("|| paused", "warn"),
    "playing": ("> playing", "good"),
}


def title_line(state: DashboardState, address: str, width: int) -> Line:
    """The program, the address and the state of the connection."""
    text, role = _STATUS_LOOKS[state.status.state]
    right: Line = [Part(text + " ", role)]
    room = width - len(" aioengine top  ") - width_of(line_text(right)) - 1
    left: Line = [Part(" aioengine top  ", "title"), Part(fit_middle(clean(address), min(room, width_of(clean(address)))), "muted")]
    return beside(left, right, width)


def tabs_line(titles: Sequence[str], active: int | None, state: DashboardState, width: int) -> Line:
    line: Line = []
    for index, title in enumerate(titles):
        line.append(Part(f" {index + 1} {title} ", "tab_on" if index == active else "muted"))
    return beside(line, [Part(f"step {state.last_step_id} " if state.last_step_id else "", "muted")], width)


def warnings_line(session: Session, width: int, *, note: str = "") -> Line | None:
    """What the user must know before believing the screen; None when there is nothing."""
    state = session.live
    parts: Line = []
    if session.is_frozen:
        parts.append(Part(f" VIEW PAUSED, {session.num_events_behind} events behind (p goes on) ", "tab_on"))
    if state.paused:
        parts.append(Part(" ENGINE PAUSED (P resumes, . steps) ", "warn"))
    if state.is_stale:
        age = f", last event {seconds(max(0.0, state.now - state.last_event_time))} ago" if state.last_event_time is not None else ""
        why = clean(state.status.detail) if state.status.state in ("lost", "ended") and state.status.detail else ""
        if state.status.state == "connecting":
            parts.append(Part(" connecting " if state.last_event_time is None else f" STALE{age}: connecting ", "stale"))
        else:
            parts.append(Part(f" STALE{age}{': ' + why if why else ''} ", "stale"))
    elif state.status.state == "ended":
        parts.append(Part(f" ENDED{': ' + clean(state.status.detail) if state.status.detail else ''} ", "warn"))
    if (gaps := state.gap_words()) is not None:
        parts.append(Part(f" {gaps} ", "bad"))
    if note:
        parts.append(Part(f" {clean(note)} ", "accent"))
    return fit_line(parts, width) if parts else None


def keys_line(hints: Sequence[tuple[str, str]], width: int) -> Line:
    """As many keys as fit whole."""
    line: Line = []
    used = 0
    for key, text in hints:
        size = width_of(key) + width_of(text) + 4
        if used + size > width:
            break
        line += [Part(f" {key}", "key"), Part(f" {text}  ", "muted")]
        used += size
    return line
