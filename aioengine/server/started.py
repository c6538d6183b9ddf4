"""A generation that an answer is made of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from aioengine.engine.outputs.output_stream import OutputStream
from aioengine.outputs import RequestOutput


class Started:
    """A generation whose first output is there: it was not refused. latest: the last one that was taken.

    on_end: called with that one when nothing follows, or nobody reads on.
    """

    __slots__ = ("_on_end", "first", "latest", "stream")

    def __init__(self, first: RequestOutput, stream: OutputStream, *, on_end: Callable[[Started], None] | None = None) -> None:
        self.first = self.latest = first
        self.stream = stream
        self._on_end = on_end

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """The first output and those after it. Leaving early aborts the request."""
        try:
            yield self.first
            if not self.first.finished:
                async for output in self.stream:
                    self.latest = output
                    yield output
        finally:
            await self.close()

    def call_when_ready(self, on_ready: Callable[[], None]) -> None:
        """As `OutputStream.call_when_ready`."""
        self.stream.call_when_ready(on_ready)

    def take_ready(self) -> RequestOutput | None:
        """As `OutputStream.take_ready`."""
        output = self.stream.take_ready()
        if output is not None:
            self.latest = output
        return output

    async def last(self) -> RequestOutput:
        async for _ in self.outputs():
            pass
        return self.latest

    async def close(self) -> None:
        await self.stream.aclose()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)
