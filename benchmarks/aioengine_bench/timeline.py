"""What happened to one request of a benchmark, and the four latencies that follow from it.

The definitions, which every tool in the field shares:

- TTFT: from the send to the first content.
- E2EL: from the send to the last content; an end marker that follows it does not count.
- ITL: the gaps between successive chunks of content. With several tokens a chunk it is not TPOT.
- TPOT: (E2EL - TTFT) / (output tokens - 1), undefined for a single output token.

A request is sent when it is handed to the engine. What it waited before that in the client, because of
`--max-concurrency`, is `client_queue_time` and in none of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["completed", "failed", "aborted"]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, with times in seconds of one clock. An error inside a stream makes it failed, whatever came before.

    max_tokens: what was asked for. queue_time: what it waited in the engine before its first step; None: not known.
    """

    index: int  # in the order of the dataset
    prompt_len: int  # tokens
    due_time: float  # when the arrival process wanted it sent
    send_time: float
    chunk_times: tuple[float, ...] = ()  # arrival of each chunk with content
    chunk_sizes: tuple[int, ...] = ()  # its tokens
    outcome: Outcome = "completed"
    error: str = ""
    text: str = ""
    num_cached_tokens: int = 0
    max_tokens: int | None = None
    finish_reason: str | None = None
    queue_time: float | None = None

    @property
    def output_len(self) -> int:
        return sum(self.chunk_sizes)

    @property
    def end_time(self) -> float:
        return self.chunk_times[-1] if self.chunk_times else self.send_time

    @property
    def client_queue_time(self) -> float:
        return max(0.0, self.send_time - self.due_time)

    @property
    def ttft(self) -> float | None:
        return self.chunk_times[0] - self.send_time if self.chunk_times else None

    @property
    def e2el(self) -> float | None:
        return self.chunk_times[-1] - self.send_time if self.chunk_times else None

    @property
    def itl(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.chunk_times, self.chunk_times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        if self.output_len < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_len - 1)
