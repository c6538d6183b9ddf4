"""`aioengine generate`: one prompt in, its continuation, or several of them, streamed to stdout."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TextIO

from aioengine.commands.runtime import describe, describe_draft_tokens, for_output, run, started_engine
from aioengine.config import EngineConfig
from aioengine.engine.publish_options import PublishOptions
from aioengine.errors import AioEngineError
from aioengine.outputs import RequestOutput
from aioengine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    prompt: str
    config: EngineConfig
    params: SamplingParams
    chat: bool | None  # None: if the model has a chat template
    system: str | None
    publish: PublishOptions
    stats: bool
    start_time: float  # perf_counter() when the command began


def generate(settings: GenerateSettings) -> None:
    run(_generate(settings))


async def _generate(settings: GenerateSettings) -> None:
    async with started_engine(settings.config, settings.publish) as engine:
        startup_s = time.perf_counter() - settings.start_time
        output: RequestOutput | None = None
        prompt = _prompt(settings, has_template=engine.tokenizer.has_chat_template)
        writer = ContinuationWriter(sys.stdout, num_continuations=settings.params.n)
        async for output in engine.generate(prompt, settings.params):
            writer.write(output)
        writer.close()
        draft_token_ids = describe_draft_tokens(engine.stats())
    if output is None:
        return
    if settings.stats:
        print(f"start-up {startup_s:.1f} s, {describe(output)}{draft_token_ids}", file=sys.stderr)
    error = next((completion.error for completion in output.outputs if completion.error is not None), None)
    if error is not None:
        raise AioEngineError(f"the generation broke off: {error}")


class ContinuationWriter:
    """Writes the continuations one after the other, each under its number if there are several.

    They are generated at once: the first one that has not ended is shown as it arrives, those behind it wait for their turn.
    """

    def __init__(self, file: TextIO, *, num_continuations: int) -> None:
        self._file = file
        self._num_continuations = num_continuations
        self._index = 0  # of the one that is being written
        self._num_chars = 0  # of it that were written
        self._has_heading = num_continuations == 1

    def write(self, output: RequestOutput) -> None:
        """Write what is new in a cumulative output, as far as it is its turn."""
        for completion in output.outputs[self._index :]:
            if not self._has_heading:
                gap = "\n\n" if self._index else ""
                self._file.write(f"{gap}[{self._index + 1}/{self._num_continuations}]\n")
                self._has_heading = True
            self._file.write(for_output(completion.text[self._num_chars :], self._file))
            self._num_chars = len(completion.text)
            if not completion.finished or self._index == self._num_continuations - 1:
                break
            self._index, self._num_chars, self._has_heading = self._index + 1, 0, False
        self._file.flush()

    def close(self) -> None:
        self._file.write("\n")


def _prompt(settings: GenerateSettings, *, has_template: bool) -> str | list[dict[str, str]]:
    chat = has_template if settings.chat is None else settings.chat
    if not chat:
        return settings.prompt
    system = [{"role": "system", "content": settings.system}] if settings.system is not None else []
    return [*system, {"role": "user", "content": settings.prompt}]
