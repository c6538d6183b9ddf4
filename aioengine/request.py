"""A request as the scheduler sees it: the ledger of what is known, computed and in flight."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from aioengine.outputs import FinishReason
from aioengine.pooling_params import PoolingParams
from aioengine.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    """Ordered on purpose: everything above PREEMPTED is finished."""

    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1  # its first blocks are being loaded from a KV connector
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7
    FINISHED_REPETITION = 8

    @property
    def is_finished(self) -> bool:
        return self > _LAST_LIVE_STATUS

    @property
    def finish_reason(self) -> FinishReason | None:
        return _FINISH_REASONS.get(self)


_LAST_LIVE_STATUS = RequestStatus.PREEMPTED  # a look-up in the enum class takes ten times as long

_FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
    RequestStatus.FINISHED_REPETITION: "repetition",
}


class Request:
    """The scheduler's side of one generation. Owned by the scheduler; nobody else writes to it.

    The counters, and how they move during a step:

    - `num_tokens`: prompt and output tokens that are known.
    - `num_output_placeholders`: tokens that a step in flight samples, so they will be known but are not yet.
    - `num_computed_tokens`: tokens whose KV is written, or will be by a step in flight. `schedule()` advances it.
    - `spec_token_ids`: draft tokens for the tokens after the known ones, while a step in flight checks them. They are counted as
      computed at once; when the step is back, those that were wrong are taken off again.

    A request has work to do while `num_computed_tokens < num_tokens + num_output_placeholders`; there is no other
    notion of phase. `max_tokens` in `sampling_params` is already a number here (the input processor resolved it).

    What is read for every request in every step is a plain attribute: at a thousand requests properties would be a third
    of a step's cost.
    """

    __slots__ = (
        "all_token_ids",
        "arrival_index",
        "arrival_time",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "end_token_ids",
        "lora_key",
        "lora_name",
        "max_num_tokens",
        "max_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_blocks",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_settled_tokens",
        "num_tokens",
        "pooling_params",
        "priority",
        "recompute_until",
        "request_id",
        "sampling_params",
        "spec_token_ids",
        "status",
        "stop_reason",
        "tail_repeats",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        sampling_params: SamplingParams,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        block_hashes: Sequence[bytes] = (),  # of the prompt's first blocks, where they are known already
        pooling_params: PoolingParams | None = None,  # the request wants an embedding and no token
        num_external_blocks: int = 0,  # so many first blocks of the prompt a KV connector has
        lora_name: str | None = None,
        lora_key: str | None = None,  # names the adapter and its content: the cached prefixes of others are not shared
    ) -> None:
        assert sampling_params.max_tokens is not None, "the input processor resolves max_tokens"
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.pooling_params = pooling_params
        self.max_tokens: int = sampling_params.max_tokens
        self.arrival_time = arrival_time
        self.priority = priority
        self.cache_salt = cache_salt
        self.lora_name = lora_name
        self.lora_key = lora_key
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None

        self.all_token_ids: list[int] = list(prompt_token_ids)  # the live history (prompt and output): copy it to keep it
        self.num_prompt_tokens = self.num_tokens = len(self.all_token_ids)
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.spec_token_ids: list[int] = []  # replaced, never changed: the step's output holds the same list
        self.num_external_blocks = num_external_blocks  # 0 from when they have been loaded, or could not be
        self.num_cached_tokens = -1  # prompt tokens that the prefix cache served; -1 until first scheduled
        self.num_preemptions = 0
        self.recompute_until = 0  # positions below this were computed before a preemption; never falls
        # Set by the scheduler: orders requests of equal priority; the length, the tokens, and the repetition that can end it.
        self.arrival_index = 0
        self.max_num_tokens = self.num_prompt_tokens + self.max_tokens
        self.end_token_ids: frozenset[int] = frozenset(sampling_params.stop_token_ids)
        self.tail_repeats: Callable[[int], bool] | None = None  # takes each output token, once; None: repetition ends nothing

        # Kept by the KVCacheManager: one list a KV-cache group; the hashes of the full blocks; how many are registered; and up to
        # how many tokens no block is missing and none becomes full, so that a step of decoding need not ask.
        self.block_ids: tuple[list[int], ...] = ([],)
        self.block_hashes: list[bytes] = list(block_hashes)
        self.num_cached_blocks = 0
        self.num_settled_tokens = 0

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        """The known tokens, and the draft tokens that a step in flight checks."""
        return self.num_tokens + len(self.spec_token_ids)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status > _LAST_LIVE_STATUS

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.status.finish_reason

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, output={self.num_output_tokens}, "
            f"computed={self.num_computed_tokens}, placeholders={self.num_output_placeholders}, draft_tokens={len(self.spec_token_ids)})"
        )
