"""Many prompts at once, for `AsyncEngine.generate_batch`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from aioengine.engine.input_processor import Prompt
from aioengine.engine.output_collector import OutputCollector
from aioengine.errors import InvalidRequestError
from aioengine.outputs import RequestOutput
from aioengine.sampling_params import SamplingParams


def params_for_each(
    prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams | None] | None
) -> list[SamplingParams | None]:
    """One entry a prompt. Raises InvalidRequestError if `prompts` is a single text or the lengths differ."""
    if isinstance(prompts, str):
        raise InvalidRequestError("generate_batch() takes a list of prompts, got one text")
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * len(prompts)
    if len(sampling_params) != len(prompts):
        raise InvalidRequestError(f"there are {len(prompts)} prompts but {len(sampling_params)} sampling_params")
    return list(sampling_params)


@contextlib.contextmanager
def naming_prompt(index: int) -> Iterator[None]:
    """Say in an InvalidRequestError which prompt it is about."""
    try:
        yield
    except InvalidRequestError as exc:
        raise InvalidRequestError(f"prompt {index}: {exc}") from exc


async def collect_batch(collectors: Sequence[OutputCollector], *, progress: bool) -> list[RequestOutput]:
    """Wait for the end of all requests; the outputs are in the order of `collectors`. Raises EngineDeadError."""
    tasks = [asyncio.create_task(collector.take()) for collector in collectors]
    try:
        # disable=None: a bar only where stderr is a terminal.
        with tqdm(total=len(tasks), desc="generating", unit="request", disable=None if progress else True) as bar:
            for task in asyncio.as_completed(tasks):
                await task
                bar.update()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
