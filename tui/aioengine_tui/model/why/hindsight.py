"""What is found out about a recording by running it again: handed in from outside, as the dashboard itself sees only events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

VerifyState = Literal["unknown", "running", "verified", "different", "refused"]


@dataclass(frozen=True, slots=True)
class Verification:
    """words: the first difference, or why the recording cannot be run again. step_id: of the first difference."""

    state: VerifyState = "unknown"
    num_steps: int = 0  # that came out the same
    words: str = ""
    step_id: int | None = None


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A run and what it would have been with one setting changed, both simulated. Times in seconds; None: no request ended."""

    num_preemptions: tuple[int, int]  # as it was, and changed
    ttft_p95: tuple[float | None, float | None]
    output_throughput: tuple[float | None, float | None]  # tokens a second


class Hindsight(Protocol):
    """Runs a recording again, elsewhere: both take seconds. Raise AioEngineError, with the reason, where that cannot be done."""

    async def verify(self) -> Verification: ...

    async def what_if(self, setting: str, *, present: int, proposed: int) -> WhatIf: ...


@dataclass(slots=True)
class KnownInHindsight:
    """What has come of it so far. Owned by the session."""

    verification: Verification = field(default_factory=Verification)
    sentences: dict[tuple[str, int], str] = field(default_factory=dict)  # (setting, proposed value) -> what it would have brought

    num_notes: int = 0  # grows whenever a sentence changes

    def note(self, setting: str, proposed: int, sentence: str) -> None:
        self.sentences[setting, proposed] = sentence
        self.num_notes += 1

    def of(self, setting: str, proposed: int | None) -> str:
        """Of that value, else of the latest that was asked for: it names the value. "" where nothing is known."""
        if proposed is not None and (setting, proposed) in self.sentences:
            return self.sentences[setting, proposed]
        return next((words for (name, _), words in reversed(self.sentences.items()) if name == setting), "")


def what_if_words(setting: str, *, proposed: int, found: WhatIf) -> str:
    """ "simulated with num_kv_cache_blocks=1200: 0 preemptions instead of 12, TTFT p95 0.8 s instead of 2.4 s" """
    parts = [f"{found.num_preemptions[1]} preemptions instead of {found.num_preemptions[0]}"] if any(found.num_preemptions) else []
    before, after = found.ttft_p95
    if before is not None and after is not None:
        parts.append(f"TTFT p95 {_duration(after)} instead of {_duration(before)}")
    before, after = found.output_throughput
    if before is not None and after is not None:
        parts.append(f"{after:.0f} tokens/s instead of {before:.0f}")
    return f"simulated with {setting}={proposed}: {', '.join(parts) or 'no request ends'}"


def verification_words(found: Verification) -> str:
    """One line, for the plain text."""
    match found.state:
        case "verified":
            return f"verified: {found.num_steps} steps run again to the same frames"
        case "different":
            return f"DIFFERS: {found.words}"
        case "refused":
            return f"cannot be run again: {found.words}"
        case "running":
            return "running it again ..."
    return "not verified"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
