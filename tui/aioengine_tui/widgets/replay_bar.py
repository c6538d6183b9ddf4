"""The bar of a recording: where one is, and what one can jump to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from aioengine.events.recording.index import Landmark
from aioengine.events.sources.base import PlaybackControl, SourceStatus
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.why.hindsight import Verification
from aioengine_tui.widgets.text import Line, Part, fit_line, seconds

MARKS: tuple[tuple[Landmark, str, str], ...] = (("slowest", "L", "accent"), ("abort", "X", "bad"), ("preemption", "!", "warn"))
"""What the bar of a recording marks: the key that jumps there, and a role. Of several in one cell the first is shown."""


_UNKNOWN = Verification()
_ROOMY = 70  # columns


def replay_line(
    playback: PlaybackControl, status: SourceStatus, state: DashboardState, width: int, *, verification: Verification = _UNKNOWN
) -> Line:
    """The place in a recording as a bar, with a mark wherever a key would jump to, and what running it again has shown."""
    position, length = status.position or 0, status.length
    start = state.header.perf_counter if state.header is not None else 0.0
    sign = ">" if status.state == "playing" else "||"
    left = f" {sign:<2} {seconds(max(0.0, state.now - start)):>7} "
    right = f" {position}/{length if length is not None else '?'}  x{status.speed:g} "
    verdict = _verdict(verification, width)
    share = min(1.0, position / length) if length else 0.0
    size = max(4, width - len(left) - len(right) - len(verdict.text))
    line: Line = [Part(left, "good" if status.state == "playing" else "warn")]
    line += _marked_bar(share, [(sign, role, playback.marks(kind, size)) for kind, sign, role in MARKS], size)
    return fit_line([*line, verdict, Part(right, "muted")], width)


def _verdict(verification: Verification, width: int) -> Part:
    """Short where the bar needs the room."""
    match verification.state:
        case "running":
            return Part(" verifying " if width >= _ROOMY else " ? ", "muted")
        case "verified":
            return Part(" VERIFIED " if width >= _ROOMY else " OK ", "good")
        case "different":
            return Part(f" DIFFERS at {verification.step_id} (V) " if width >= _ROOMY else " DIFFERS ", "bad")
        case "refused":
            return Part(" not verifiable " if width >= _ROOMY else " - ", "warn")
    return Part("", "muted")


def _marked_bar(share: float, marks: Sequence[tuple[str, str, list[bool]]], size: int) -> Line:
    """A bar of `size` cells; the cell of the present place stands out, whatever is marked there."""
    here = min(size - 1, int(share * size))
    cells: list[Part] = []
    for cell in range(size):
        text, role = ("━", "accent") if cell < here else ("·", "budget_left")
        for sign, sign_role, on in marks:
            if on[cell]:
                text, role = sign, sign_role
                break
        cells.append(Part("█", "value") if cell == here and text in "━·" else Part(text, "cursor" if cell == here else role))
    return [Part("".join(part.text for part in run), role) for role, run in groupby(cells, key=lambda part: part.role)]
