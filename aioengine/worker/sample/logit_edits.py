"""What requests do to their own logits: allowed_token_ids, bad_words, logit_bias and penalties, for all rows of a step.

Only rows that ask for something are looked at: a step without any has no `LogitEdits`. Everything is a gather, elementwise
arithmetic and a scatter, so a row's bits depend on nothing but the row; and it is the same code on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioengine.sampling_params import SamplingParams
from aioengine.worker.sample.row import check_edit_widths

LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

_PENALTY_GROUP = 64
"""Rows that are penalised at once: their token counts take 4 * vocab_size bytes a row."""

_NONE: LongArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class RequestLogitEdits:
    """What one request does to its logits; tokens that the vocabulary does not have are left out."""

    allowed_token_ids: LongArray | None
    bad_token_ids: LongArray  # the bad words of one token
    word_prefixes: LongArray  # [w, m]: those of several: their tokens but the last, at the right; -1 at the left
    word_last_ids: LongArray  # [w]: their last tokens
    bias_token_ids: LongArray
    biases: FloatArray
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        return self.has_penalties or len(self.word_last_ids) > 0


def request_logit_edits(params: SamplingParams, *, vocab_size: int) -> RequestLogitEdits | None:
    """None for a request that leaves its logits as they are."""
    has_penalties = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    if params.allowed_token_ids is None and not params.bad_words_token_ids and not params.logit_bias and not has_penalties:
        return None
    check_edit_widths(params)
    words = [word for word in params.bad_words_token_ids if word and max(word) < vocab_size]
    bias_ids = np.fromiter(params.logit_bias, dtype=np.int64, count=len(params.logit_bias))
    biases = np.fromiter(params.logit_bias.values(), dtype=np.float32, count=len(bias_ids))
    prefixes, last = _split_words([word for word in words if len(word) > 1])
    return RequestLogitEdits(
        allowed_token_ids=None if params.allowed_token_ids is None else _ids_below(vocab_size, params.allowed_token_ids),
        bad_token_ids=np.asarray([word[0] for word in words if len(word) == 1], dtype=np.int64),
        word_prefixes=prefixes,
        word_last_ids=last,
        bias_token_ids=bias_ids[bias_ids < vocab_size],
        biases=biases[bias_ids < vocab_size],
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
    )


def _split_words(words: Sequence[Sequence[int]]) -> tuple[LongArray, LongArray]:
    """[w, m]: the tokens but the last of each word, at the right, -1 at the left; [w]: the last ones."""
    width = max((len(word) - 1 for word in words), default=0)
    prefixes = np.full((len(words), width), -1, dtype=np.int64)
    for place, word in enumerate(words):
        prefixes[place, width + 1 - len(word) :] = word[:-1]
    return prefixes, np.asarray([word[-1] for word in words], dtype=np.int64)


def _widen(prefixes: LongArray, width: int) -> LongArray:
    return np.pad(prefixes, ((0, 0), (width - prefixes.shape[1], 0)), constant_values=-1)


@dataclass(frozen=True, slots=True)
class LogitEditArrays:
    """A step's edits on the host. A position is row * vocab_size + token id, in the flattened logits."""

    allowed_rows: LongArray  # [a]: the rows that may only sample what is in
    allowed_positions: LongArray  # [.]
    bad_positions: LongArray  # [.]: never sampled
    bias_positions: LongArray  # [.]
    biases: FloatArray  # [.]
    history_rows: LongArray  # [h]: the rows whose edits depend on their tokens so far
    history_slots: LongArray  # [h]: where those are in the token table
    history_lens: LongArray  # [h]: how many there are, prompt and output
    num_prompt_tokens: LongArray  # [h]
    penalties: FloatArray  # [3, h]: repetition, frequency, presence
    word_histories: LongArray  # [w]: for each bad word of several tokens, the entry of history_rows it is about
    word_prefixes: LongArray  # [w, m]: its tokens but the last, at the right; -1 at the left
    word_positions: LongArray  # [w]: of its last token
    max_history_len: int
    has_penalties: bool

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All arrays by the names of their fields."""
        return {field.name: value for field in fields(self) if isinstance(value := getattr(self, field.name), np.ndarray)}


def logit_edit_arrays(
    rows: Sequence[tuple[int, RequestLogitEdits]],  # row of the logits, and what its request does to it
    *,
    slots: LongArray,  # [n]
    history_lens: LongArray,  # [n]
    num_prompt_tokens: LongArray,  # [n]
    vocab_size: int,
) -> LogitEditArrays:
    """Collect what the rows of a step do."""
    histories = [(row, logit_edits) for row, logit_edits in rows if logit_edits.needs_history]
    history_rows = np.asarray([row for row, _ in histories], dtype=np.int64)
    allowed = [(row, logit_edits.allowed_token_ids) for row, logit_edits in rows if logit_edits.allowed_token_ids is not None]
    words = [(place, row, logit_edits) for place, (row, logit_edits) in enumerate(histories) if len(logit_edits.word_last_ids)]
    width = max((logit_edits.word_prefixes.shape[1] for _, _, logit_edits in words), default=0)
    no_prefixes = np.zeros((0, width), dtype=np.int64)
    lens = history_lens[history_rows]
    return LogitEditArrays(
        allowed_rows=np.asarray([row for row, _ in allowed], dtype=np.int64),
        allowed_positions=_join([row * vocab_size + ids for row, ids in allowed]),
        bad_positions=_join([row * vocab_size + logit_edits.bad_token_ids for row, logit_edits in rows if len(logit_edits.bad_token_ids)]),
        bias_positions=_join([row * vocab_size + logit_edits.bias_token_ids for row, logit_edits in rows if len(logit_edits.biases)]),
        biases=np.concatenate([np.zeros(0, dtype=np.float32), *(logit_edits.biases for _, logit_edits in rows)]),
        history_rows=history_rows,
        history_slots=slots[history_rows],
        history_lens=lens,
        num_prompt_tokens=num_prompt_tokens[history_rows],
        penalties=_columns([(e.repetition_penalty, e.frequency_penalty, e.presence_penalty) for _, e in histories]),
        word_histories=_join([np.full(len(logit_edits.word_last_ids), place, dtype=np.int64) for place, _, logit_edits in words]),
        word_prefixes=np.concatenate([no_prefixes, *(_widen(logit_edits.word_prefixes, width) for _, _, logit_edits in words)]),
        word_positions=_join([row * vocab_size + logit_edits.word_last_ids for _, row, logit_edits in words]),
        max_history_len=int(lens.max()) if len(lens) else 0,
        has_penalties=any(logit_edits.has_penalties for _, logit_edits in histories),
    )


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """`LogitEditArrays` as tensors on the device of the logits, with the tokens that they depend on."""

    allowed_rows: torch.Tensor  # [a] int64
    allowed_positions: torch.Tensor  # [.] int64
    bad_positions: torch.Tensor  # [.] int64
    bias_positions: torch.Tensor  # [.] int64
    biases: torch.Tensor  # [.] float32
    history_rows: torch.Tensor  # [h] int64
    history_lens: torch.Tensor  # [h] int64
    num_prompt_tokens: torch.Tensor  # [h] int64
    penalties: torch.Tensor  # [3, h] float32
    word_histories: torch.Tensor  # [w] int64
    word_prefixes: torch.Tensor  # [w, m] int64
    word_positions: torch.Tensor  # [w] int64
    token_ids: torch.Tensor  # [h, max_history_len] int64; behind history_lens: anything
    has_penalties: bool

    @classmethod
    def build(
        cls,
        host: LogitEditArrays,
        tensors: Mapping[str, torch.Tensor],  # `host.arrays()` on the device
        *,
        token_table: torch.Tensor,  # [max_num_reqs, max_model_len] int32
    ) -> LogitEdits:
        """Copies the histories: the table may move on to a later step."""
        histories = token_table[:, : host.max_history_len].index_select(0, tensors["history_slots"]).long()
        as_they_are = {name: tensor for name, tensor in tensors.items() if name != "history_slots"}
        return cls(**as_they_are, token_ids=histories, has_penalties=host.has_penalties)


def apply_masks(logits: torch.Tensor, logit_edits: LogitEdits) -> None:
    """allowed_token_ids, then bad_words: what may not be sampled becomes -inf in `logits` [n, vocab_size], in place.

    As in vLLM, a bad word's last token is forbidden where the end of the output is the rest of the word.
    """
    flat = logits.view(-1)
    if logit_edits.allowed_rows.shape[0]:
        kept = flat.index_select(0, logit_edits.allowed_positions)
        logits.index_fill_(0, logit_edits.allowed_rows, -torch.inf)
        flat.index_copy_(0, logit_edits.allowed_positions, kept)
    if logit_edits.bad_positions.shape[0]:
        flat.index_fill_(0, logit_edits.bad_positions, -torch.inf)
    if logit_edits.word_positions.shape[0]:
        bound = torch.where(_matches(logit_edits), -torch.inf, torch.inf)
        flat.scatter_reduce_(0, logit_edits.word_positions, bound, "amin")


def apply_bias(logits: torch.Tensor, logit_edits: LogitEdits) -> None:
    """logit_bias, in place."""
    if logit_edits.bias_positions.shape[0]:
        flat = logits.view(-1)
        flat.index_copy_(0, logit_edits.bias_positions, flat.index_select(0, logit_edits.bias_positions) + logit_edits.biases)


def apply_penalties(logits: torch.Tensor, logit_edits: LogitEdits) -> None:
    """Repetition penalty (Keskar et al., arXiv:1909.05858) over prompt and output, then frequency and presence penalty
    over the output, in place. Only the logits of tokens that occurred are read."""
    if logit_edits.has_penalties:
        for start in range(0, logit_edits.history_rows.shape[0], _PENALTY_GROUP):
            _penalise(logits, logit_edits, slice(start, start + _PENALTY_GROUP))


def _matches(logit_edits: LogitEdits) -> torch.Tensor:  # [w] bool: the output ends with the bad word's prefix
    width = logit_edits.word_prefixes.shape[1]
    lens = logit_edits.history_lens[logit_edits.word_histories]
    places = lens[:, None] + torch.arange(-width, 0, device=lens.device)  # [w, m]
    tail = logit_edits.token_ids[logit_edits.word_histories[:, None], places.clamp(min=0)]
    is_padding = logit_edits.word_prefixes < 0
    is_output = places >= logit_edits.num_prompt_tokens[logit_edits.word_histories, None]
    return (is_padding | ((tail == logit_edits.word_prefixes) & is_output)).all(dim=1)


def _penalise(logits: torch.Tensor, logit_edits: LogitEdits, group: slice) -> None:
    vocab_size = logits.shape[1]
    lens, num_prompt = logit_edits.history_lens[group, None], logit_edits.num_prompt_tokens[group, None]
    repetition, frequency, presence = logit_edits.penalties[:, group, None].unbind(0)  # each [g, 1]
    places = torch.arange(logit_edits.token_ids.shape[1], device=logits.device)
    # Behind its end a history repeats its first token: the same value is computed, and written, once more.
    token_ids = torch.where(places < lens, logit_edits.token_ids[group], logit_edits.token_ids[group, :1])  # [g, l]
    is_output = (places >= num_prompt) & (places < lens)
    counts = torch.zeros(token_ids.shape[0], vocab_size, dtype=torch.int32, device=logits.device)
    counts = counts.scatter_add_(1, token_ids, is_output.int()).gather(1, token_ids)  # [g, l]
    positions = logit_edits.history_rows[group, None] * vocab_size + token_ids
    flat = logits.view(-1)
    values = flat[positions]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts
    values -= presence * (counts > 0)
    flat[positions] = values


def _ids_below(vocab_size: int, token_ids: Sequence[int]) -> LongArray:
    ids = np.asarray(token_ids, dtype=np.int64)
    return np.unique(ids[ids < vocab_size])


def _columns(rows: Sequence[tuple[float, float, float]]) -> FloatArray:  # [3, len(rows)]
    return np.ascontiguousarray(np.asarray(rows, dtype=np.float32).reshape(-1, 3).T)


def _join(pieces: Sequence[LongArray]) -> LongArray:
    return np.concatenate(pieces) if pieces else _NONE
