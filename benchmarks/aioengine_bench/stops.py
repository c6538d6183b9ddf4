"""When a load ends before its last request: time, failures, a server that falls behind."""

from __future__ import annotations

from dataclasses import dataclass

_FEWEST_ENDED = 10  # of fewer requests a share says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """None: never for this reason."""

    max_duration: float | None = None  # seconds
    max_error_rate: float | None = None  # share of the requests that ended
    max_waiting: int | None = None  # requests that were sent and have no token yet

    def why(self, *, num_ended: int, num_failed: int, num_waiting: int) -> str | None:
        """The reason to stop now, in words; time is looked after by a timer."""
        if self.max_error_rate is not None and num_ended >= _FEWEST_ENDED and num_failed > self.max_error_rate * num_ended:
            return (
                f"{num_failed} of {num_ended} requests failed, more than the share of {self.max_error_rate:g} that --max-error-rate allows"
            )
        if self.max_waiting is not None and num_waiting > self.max_waiting:
            return f"over-saturated: {num_waiting} requests wait for their first token, and --max-waiting is {self.max_waiting}"
        return None

    @property
    def time_is_up(self) -> str:
        return f"the {self.max_duration:g} seconds of --max-duration are over"
