"""How the demo shows its streams: in place on a terminal, as lines anywhere else."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from aioengine.outputs import RequestOutput
from aioengine.printable import PROSE, printable

_REFRESH_INTERVAL_S = 0.125  # rendering holds the event loop, so it is bounded here and not by the token rate
_PLAIN_LINE_WIDTH = 88


class DemoView(ABC):
    """Takes the outputs of numbered streams. A context manager: shown on entry, complete on exit."""

    @abstractmethod
    def update(self, index: int, output: RequestOutput) -> None:
        """Stream `index` has got further."""

    async def keep_fresh(self) -> None:
        """Redraw until cancelled; a view that draws in `update` has nothing to do here."""
        return

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        """Show what is not shown yet."""


class PlainView(DemoView):
    """Interleaved lines, each with the number of its stream: for pipes, logs and screen readers."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._pending = [""] * len(prompts)
        for index, prompt in enumerate(prompts, start=1):
            print(f"[{index}] > {prompt}", flush=True)

    def update(self, index: int, output: RequestOutput) -> None:
        text = self._pending[index] + printable(output.text_delta, keep=PROSE)
        *lines, text = text.split("\n")
        for line in lines:
            self._print(index, line)
        while len(text) > _PLAIN_LINE_WIDTH and (cut := text.rfind(" ", 0, _PLAIN_LINE_WIDTH)) > 0:
            self._print(index, text[:cut])
            text = text[cut + 1 :]
        if output.finished:
            self._print(index, text)
            text = ""
        self._pending[index] = text

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        for index, text in enumerate(self._pending):
            self._print(index, text)

    def _print(self, index: int, line: str) -> None:
        if line.strip():
            print(f"[{index + 1}] {line}", flush=True)


class LiveView(DemoView):
    """All streams in place: a line with the engine's gauges, then each prompt with the end of its answer."""

    def __init__(self, prompts: Sequence[str], gauges: Callable[[], str]) -> None:
        self._prompts = prompts
        self._gauges = gauges
        self._outputs: list[RequestOutput | None] = [None] * len(prompts)
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._render, redirect_stdout=False)

    def update(self, index: int, output: RequestOutput) -> None:
        self._outputs[index] = output

    async def keep_fresh(self) -> None:
        while True:
            self._live.refresh()
            await asyncio.sleep(_REFRESH_INTERVAL_S)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self._live.stop()  # draws the last state

    def _render(self) -> RenderableType:
        # One line for the gauges and a spare one; the rest is shared out evenly, a title and some text for each stream.
        num_text_lines = min(4, max(1, (self._console.height - 2) // len(self._prompts) - 1))
        parts: list[Text] = [Text(self._gauges(), style="bold", no_wrap=True, overflow="ellipsis")]
        for prompt, output in zip(self._prompts, self._outputs, strict=True):
            parts.append(self._title(prompt, output))
            parts.extend(self._tail("" if output is None else output.text, num_text_lines))
        return Group(*parts)

    def _title(self, prompt: str, output: RequestOutput | None) -> Text:
        title = Text(no_wrap=True, overflow="ellipsis")
        done = output is not None and output.finished
        title.append("✓ " if done else "· ", style="green" if done else "yellow")
        title.append(prompt, style="cyan")
        if output is not None:
            title.append(f"  {len(output.token_ids)} tokens", style="dim")
        return title

    def _tail(self, text: str, num_lines: int) -> list[Text]:
        """The last lines of `text`, always `num_lines` of them so that nothing on the screen jumps."""
        flat = printable(" ".join(text.split()), keep=PROSE)
        lines = list(Text(flat).wrap(self._console, max(self._console.width - 2, 10)))[-num_lines:]
        padded = [*lines, *[Text("")] * (num_lines - len(lines))]
        return [Text("  ").append_text(line) for line in padded]
