"""What the way in hands to the scheduler and to the way out."""

from __future__ import annotations

from dataclasses import dataclass, field

from aioengine.pooling_params import PoolingParams
from aioengine.sampling_params import SamplingParams
from aioengine.structured_output.matcher import CompiledGrammar


@dataclass(frozen=True, slots=True)
class ProcessedInput:
    """A request that is fit for the scheduler."""

    prompt_token_ids: list[int]
    sampling_params: SamplingParams  # max_tokens and seed are numbers, bad_words are in token ids too
    prompt: str | None  # the text that was tokenised, before it was truncated
    grammar: CompiledGrammar | None = None  # what the output has to match
    block_hashes: list[bytes] = field(
        default_factory=list
    )  # of the prompt's first full blocks, if it is a long one or a connector was asked
    pooling_params: PoolingParams | None = None  # an embedding is wanted, and no token
    num_external_blocks: int = 0  # so many of them a KV connector has
    lora_name: str | None = None
    lora_key: str | None = None  # names the adapter and its content
