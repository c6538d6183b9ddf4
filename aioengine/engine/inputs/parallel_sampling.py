"""n > 1: several continuations of one prompt, each a request of its own to the scheduler.

Nothing else has to be done for them to share the prompt's KV blocks: the prefix cache finds what the first one computes,
also within the same step. Without prefix cache each of them computes the prompt.
"""

from __future__ import annotations

import hashlib

from aioengine.sampling_params import SamplingParams


def child_id(request_id: str, index: int) -> str:
    """The scheduler's name for continuation `index`."""
    return f"{request_id}-{index}"


def child_seed(seed: int, index: int) -> int:
    """The seed of continuation `index`, in [0, 2**64).

    The first one has the request's own, so it is what n=1 gives; and no seed depends on n, so a larger n only adds
    continuations. Hashed and not counted up: else the second continuation of one seed would be the first of the next.
    """
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


def child_params(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of the `params.n` continuations. `params.seed` must be a number."""
    if params.n == 1:
        return [params]
    assert params.seed is not None, "the input processor draws the seed"
    first = params.with_values(n=1)
    # The prompt's logprobs are the same for all of them, and keep a request from using the prefix cache.
    rest = first.with_values(prompt_logprobs=None)
    return [first, *(rest.with_values(seed=child_seed(params.seed, index)) for index in range(1, params.n))]
