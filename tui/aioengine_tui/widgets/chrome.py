"""The frame around every screen: title, tabs, warnings, and the keys."""

from __future__ import annotations

from collections.abc import Sequence

from textual.keys import _character_to_key

from aioengine_tui.model.state import DashboardState
from aioengine_tui.session import Session
from aioengine_tui.widgets.text import Hot, Line, Part, beside, clean, fit_line, fit_middle, line_text, seconds, width_of

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


def tabs_line(tabs: Sequence[tuple[str, str]], active: str, state: DashboardState, width: int) -> Line:
    """tabs: (id, title) of each screen, in the order of their digits. Titles get shorter where not all fit."""
    step = f"step {state.last_step_id} " if state.last_step_id else ""
    for size in (99, 8, 6, 4, 3):
        line: Line = []
        for index, (name, title) in enumerate(tabs, start=1):
            text = f" {index} {_short(title, size)} " if size > 4 else f" {index}{_short(title, size)} "
            line.append(Hot(text, "tab_on" if name == active else "muted", f"app.show('{name}')"))
        if width_of(line_text(line)) <= width:
            break
    return beside(line, [Part(step, "muted")], width)


def _short(title: str, size: int) -> str:
    """The first word, or as much of it as has room; an abbreviation needs no mark, its digit is beside it."""
    return title if len(title) <= size else title.split()[0][:size]


def warnings_line(session: Session, width: int, *, note: str = "") -> Line | None:
    """What the user must know before believing the screen; None when there is nothing.

    Each warning has a short form: that a view is paused or stale is said in the narrowest terminal, and the rest where there is room.
    """
    warnings = _warnings(session)
    if note:
        text = f" {clean(note)} "
        warnings.append((text, text, "accent", ""))
    if (gaps := session.live.gap_words()) is not None:
        warnings.append((f" {gaps} ", f" {session.live.num_dropped or 'events'} lost ", "bad", ""))
    if not warnings:
        return None
    texts = [short for _, short, _, _ in warnings]
    for index, (long, short, _, _) in enumerate(warnings):
        if sum(map(width_of, texts)) - width_of(short) + width_of(long) <= width:
            texts[index] = long
    line: Line = [
        Hot(text, role, action) if action else Part(text, role) for text, (_, _, role, action) in zip(texts, warnings, strict=True) if text
    ]
    return fit_line(line, width)


def _warnings(session: Session) -> list[tuple[str, str, str, str]]:
    """(in full, in short, role, what a click does)"""
    state, warnings = session.live, []
    if session.is_frozen:
        behind = f" VIEW PAUSED, {session.num_events_behind} events behind (p goes on) "
        warnings.append((behind, " VIEW PAUSED ", "tab_on", "app.pause"))
    if state.paused:
        warnings.append((" ENGINE PAUSED (P resumes, . steps) ", " ENGINE PAUSED ", "warn", ""))
    why = f": {clean(state.status.detail)}" if state.status.detail else ""
    if state.is_stale:
        age = f", last event {seconds(max(0.0, state.now - state.last_event_time))} ago" if state.last_event_time is not None else ""
        if state.status.state == "connecting":
            text = " connecting " if state.last_event_time is None else f" STALE{age}: connecting "
            warnings.append((text, " connecting " if state.last_event_time is None else " STALE ", "stale", ""))
        else:
            warnings.append((f" STALE{age}{why if state.status.state in ('lost', 'ended') else ''} ", " STALE ", "stale", ""))
    elif state.status.state == "ended":
        warnings.append((f" ENDED{why} ", " ENDED ", "warn", ""))
    return warnings


_KEY_NAMES = {
    "enter": "enter",
    "esc": "escape",
    "space": "space",
    "end": "end",
    "tab": "tab",
    "↑": "up",
    "↓": "down",
    "←": "left",
    "→": "right",
}


def keys_line(hints: Sequence[tuple[str, str]], width: int) -> Line:
    """As many keys as fit whole. A click on one presses it."""
    line: Line = []
    used = 0
    for key, text in hints:
        size = width_of(key) + width_of(text) + 4
        if used + size > width:
            break
        line += [Part(" "), *_keys(key, text)]
        used += size
    return line


def _keys(key: str, text: str) -> Line:
    """ "[ ]" and "↑↓" are two keys, "1-5" is none: the words belong to the only key."""
    single = _key_name(key)
    if single is not None:
        return [Hot(key, "key", f"app.press('{single}')"), Hot(f" {text}  ", "muted", f"app.press('{single}')")]
    parts: Line = []
    for character in key:
        name = _key_name(character) if "-" not in key[1:-1] else None
        parts.append(Part(character, "key") if name is None else Hot(character, "key", f"app.press('{name}')"))
    return [*parts, Part(f" {text}  ", "muted")]


def _key_name(key: str) -> str | None:
    """As Textual names it; None for what is no key."""
    if key in _KEY_NAMES:
        return _KEY_NAMES[key]
    return _character_to_key(key) if len(key) == 1 and not key.isspace() else None
