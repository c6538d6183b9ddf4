"""Where two runs first differ, in words."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

_MAX_TEXT = 120
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Difference:
    """What of which step is not as it was. event: "step" (as scheduled) or "result" (as taken in)."""

    step_id: int
    event: str
    field: str  # a path: "output.num_scheduled_tokens['r1']"
    recorded: Any
    now: Any

    def __str__(self) -> str:
        where = f"step {self.step_id}" if self.event == "step" else f"result of step {self.step_id}"
        return f"{where}: {self.field}: recorded {_short(self.recorded)}, now {_short(self.now)}"

    def as_json(self) -> dict[str, Any]:
        """Plain values; those that differ as texts, which may be cut."""
        return {
            "step_id": self.step_id,
            "event": self.event,
            "field": self.field,
            "recorded": _short(self.recorded),
            "now": _short(self.now),
        }


def find_difference(field: str, recorded: Any, now: Any) -> tuple[str, Any, Any] | None:
    """The first place where two values of a dataclass, a mapping or a sequence differ: (path, recorded, now); None if nowhere."""
    if recorded == now and type(recorded) is type(now):
        return None
    if dataclasses.is_dataclass(recorded) and type(recorded) is type(now):
        for f in dataclasses.fields(recorded):
            found = find_difference(f"{field}.{f.name}", getattr(recorded, f.name), getattr(now, f.name))
            if found is not None:
                return found
        return None
    if isinstance(recorded, dict) and isinstance(now, dict):
        if list(recorded) != list(now):
            return field, list(recorded), list(now)
        return next((found for key in recorded if (found := find_difference(f"{field}[{key!r}]", recorded[key], now[key]))), None)
    if isinstance(recorded, (list, tuple)) and isinstance(now, (list, tuple)) and (len(recorded) > 8 or len(now) > 8):
        for index in range(max(len(recorded), len(now))):
            one, other = (values[index] if index < len(values) else _ABSENT for values in (recorded, now))
            if one != other:
                return f"{field}[{index}]", one, other
        return None
    return None if recorded == now else (field, recorded, now)


def _short(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    text = repr(sorted(value)) if isinstance(value, (set, frozenset)) else repr(value)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
