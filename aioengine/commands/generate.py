"""`aioengine generate`: one prompt in, its continuation streamed to stdout."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from aioengine.commands.runtime import describe, run, started_engine
from aioengine.config import EngineConfig
from aioengine.engine.publishing import PublishOptions
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
        async for output in engine.generate(prompt, settings.params):
            sys.stdout.write(output.text_delta)
            sys.stdout.flush()
        sys.stdout.write("\n")
    if settings.stats and output is not None:
        print(f"start-up {startup_s:.1f} s, {describe(output)}", file=sys.stderr)


def _prompt(settings: GenerateSettings, *, has_template: bool) -> str | list[dict[str, str]]:
    chat = has_template if settings.chat is None else settings.chat
    if not chat:
        return settings.prompt
    system = [{"role": "system", "content": settings.system}] if settings.system is not None else []
    return [*system, {"role": "user", "content": settings.prompt}]
