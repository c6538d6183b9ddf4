"""Many prompts at once, for `AsyncEngine.generate_batch` and `embed`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from tqdm import tqdm

from aioengine.checks.values import shorten
from aioengine.engine.inputs.input_processor import Prompt
from aioengine.engine.outputs.output_collector import OutputCollector
from aioengine.errors import AioEngineError, InvalidRequestError
from aioengine.outputs import EmbeddingOutput, RequestOutput
from aioengine.sampling_params import SamplingParams

MAX_BATCH_PROMPTS = 1_000_000
"""What has no end is not read to it."""


def pair_up(
    prompts: Iterable[Prompt], sampling_params: SamplingParams | Iterable[SamplingParams | None] | None, *, call: str
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Each prompt with its parameters. Raises InvalidRequestError if `prompts` is no list of prompts or the lengths differ."""
    if isinstance(prompts, str):
        raise InvalidRequestError(f"{call} takes a list of prompts, got one text")
    if isinstance(prompts, Set):
        raise InvalidRequestError(f"{call} takes a list of prompts, got a {type(prompts).__name__}, which has no order")
    items = _read(prompts, "prompts", call=call)
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [(prompt, sampling_params) for prompt in items]
    params = _read(sampling_params, "sampling_params", call=call)
    if len(params) != len(items):
        raise InvalidRequestError(f"there are {len(items)} prompts but {len(params)} sampling_params")
    return list(zip(items, params, strict=True))


def _read(given: Any, name: str, *, call: str) -> list[Any]:
    """The items of anything that can be gone through once, at most MAX_BATCH_PROMPTS."""
    if isinstance(given, (str, bytes, bytearray, memoryview, Mapping)) or not isinstance(given, Iterable):
        raise InvalidRequestError(f"{call}: {name} must be a list, got {shorten(given)}")
    try:
        items = list(itertools.islice(given, MAX_BATCH_PROMPTS + 1))
    except Exception as exc:  # the caller's own code
        raise InvalidRequestError(f"{call}: {name} cannot be read: {type(exc).__name__}: {exc}") from exc
    if len(items) > MAX_BATCH_PROMPTS:
        raise InvalidRequestError(f"{call} takes at most {MAX_BATCH_PROMPTS} {name}, got more")
    return items


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


def read_embedding(index: int, collector: OutputCollector, output: RequestOutput) -> EmbeddingOutput:
    """What a request that has ended gave. Raises AioEngineError if that is no embedding."""
    if collector.embedding is None:
        end = output.outputs[0]
        raise AioEngineError(f"prompt {index} has no embedding: {end.error or end.finish_reason}")
    return EmbeddingOutput(collector.embedding, output.prompt_token_ids, output.num_cached_tokens)
