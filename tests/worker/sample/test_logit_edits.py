"""Penalties, logit_bias, allowed_token_ids and bad_words against oracles in plain Python, one number at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.errors import InvalidRequestError
from aioengine.sampling_params import SamplingParams
from aioengine.worker.pipeline.staging import Staging
from aioengine.worker.pipeline.transfers import HostTransfers
from aioengine.worker.sample.device_sampler import sample_on_device, sampling_arrays, staged_sampling
from aioengine.worker.sample.sampler import SamplerOutput, sample
from aioengine.worker.sample.states import SamplingBatch, SamplingStates

VOCAB_SIZE = 23
EOS = 3

Row = tuple[list[int], list[int], dict[str, Any]]
"""A request: its prompt, its output so far, and its parameters."""


def make_batch(rows: list[Row], *, spare: int = 2) -> tuple[SamplingBatch, torch.Tensor]:
    """The rows through the slot tables, in slots that are not their numbers; behind the tokens lies other people's rest."""
    states = SamplingStates(max_num_reqs=len(rows) + spare, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
    table = np.random.default_rng(0).integers(0, VOCAB_SIZE, (len(rows) + spare, 64)).astype(np.int32)
    slots = np.arange(len(rows), dtype=np.int64)[::-1] + spare
    for slot, (prompt, output, options) in zip(slots.tolist(), rows, strict=True):
        states.set(slot, SamplingParams(**{"seed": 0, **options}), num_prompt_tokens=len(prompt))
        table[slot, : len(prompt) + len(output)] = prompt + output
    batch = states.gather(slots, np.asarray([len(output) for _, output, _ in rows], dtype=np.int64))
    return batch, torch.from_numpy(table)


def on_host(logits: torch.Tensor, rows: list[Row]) -> SamplerOutput:
    batch, table = make_batch(rows)
    return sample(logits.clone(), batch, token_table=table, logprobs_mode="processed_logits")


def on_device(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    batch, table = make_batch(rows)
    slots = np.arange(len(rows), dtype=np.int64)
    arrays = Staging(HostTransfers()).stage(sampling_arrays(batch, slots, vocab_size=VOCAB_SIZE))
    staged = staged_sampling(arrays.groups, batch, token_table=table)
    last = torch.zeros(len(rows), dtype=torch.int32)
    tokens: list[int] = sample_on_device(logits.clone(), staged, last_sampled_tokens=last).token_ids.tolist()
    return tokens


def make_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


tokens = st.integers(0, VOCAB_SIZE - 1)
few_tokens = st.integers(0, 4)  # so that tokens repeat, and bad words match
options = st.fixed_dictionaries(
    {"temperature": st.just(0.0), "logprobs": st.just(20)},
    optional={
        "presence_penalty": st.sampled_from([-2.0, 0.3, 1.0]),
        "frequency_penalty": st.sampled_from([-1.0, 0.1, 2.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.1, 2.0]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB_SIZE + 4), st.floats(-100, 100, width=16), max_size=4),
        "allowed_token_ids": st.lists(tokens, min_size=3, max_size=12),
        "bad_words_token_ids": st.lists(st.lists(few_tokens, min_size=1, max_size=4).map(tuple), max_size=4).map(tuple),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(tokens, max_size=2),
    },
)


def is_accepted(options: dict[str, Any]) -> bool:
    """Options that leave no token to sample are refused when they are built."""
    try:
        SamplingParams(**options)
    except InvalidRequestError:
        return False
    return True


requests = st.tuples(st.lists(few_tokens | tokens, min_size=1, max_size=10), st.lists(few_tokens, max_size=8), options.filter(is_accepted))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(requests, min_size=1, max_size=6), seed=st.integers(0, 5))
def test_a_row_is_edited_as_the_oracle_says_alone_and_in_a_crowd(
    expected_logits: Callable[..., list[float]], rows: list[Row], seed: int
) -> None:
    logits = make_logits(len(rows), seed)
    together = on_host(logits, rows)
    device_tokens = on_device(logits, rows)
    for i, row in enumerate(rows):
        expected = expected_logits(logits[i].tolist(), *row, eos=EOS)
        alone = on_host(logits[i : i + 1], [row])
        assert alone.logprobs.get(0) == together.logprobs[i]
        assert alone.token_ids[0] == together.token_ids[i]
        if max(expected) == -math.inf:
            assert i in together.failed
            continue
        assert expected[int(together.token_ids[i])] == max(expected)
        entry = {token: value.logprob for token, value in together.logprobs[i].items()}
        assert entry == {token: expected[token] for token in entry}
        possible = sum(value > -math.inf for value in expected)
        assert len(entry) == min(possible, 20)
        assert device_tokens[i] == together.token_ids[i]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    "mine",
    [
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.3},
        {"logit_bias": {5: 3.0}},
        {"allowed_token_ids": [1, 2, 3, 8]},
        {"bad_words_token_ids": ((1,), (2, 4), (4, 2, 4, 0))},
    ],
    ids=lambda mine: next(iter(mine)),
)
def test_default_rows_keep_their_bits_beside_one_that_is_edited(mine: dict[str, Any], temperature: float) -> None:
    logits = make_logits(3)
    plain: Row = ([1, 2], [4, 2, 4], {"temperature": temperature, "logprobs": 20, "seed": 3})
    edited: Row = ([1, 2], [4, 2, 4], {**plain[2], **mine})
    apart, beside = on_host(logits, [plain] * 3), on_host(logits, [plain, edited, plain])
    assert [beside.logprobs[i] for i in (0, 2)] == [apart.logprobs[i] for i in (0, 2)]
    assert beside.token_ids[[0, 2]].tolist() == apart.token_ids[[0, 2]].tolist()
    assert beside.logprobs[1] != apart.logprobs[1], "the parameter has no effect"


@pytest.mark.parametrize(
    ("options", "output", "winner"),
    [
        ({}, [], 7),
        ({"presence_penalty": 2.0}, [], 7),  # the prompt does not count
        ({"frequency_penalty": 2.0}, [], 7),
        ({"repetition_penalty": 2.0}, [], 8),  # it does here
        ({"presence_penalty": 2.0}, [7], 8),
        ({"presence_penalty": 2.0}, [7, 7, 7], 8),
        ({"frequency_penalty": 0.4}, [7], 7),
        ({"frequency_penalty": 0.4}, [7, 7, 7], 8),
        ({"repetition_penalty": 2.0}, [8], 9),
    ],
)
def test_repetition_looks_at_prompt_and_output_presence_and_frequency_at_the_output(
    options: dict[str, Any], output: list[int], winner: int
) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [7, 8, 9]] = torch.tensor([5.0, 4.0, 3.0])
    row = ([7, 7, 7], output, {"temperature": 0, **options})
    assert int(on_host(logits, [row]).token_ids[0]) == winner
    assert on_device(logits, [row]) == [winner]


def test_a_step_of_default_rows_has_no_edits_to_look_at() -> None:
    states = SamplingStates(max_num_reqs=2, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())
    one = np.zeros(1, dtype=np.int64)
    states.set(0, SamplingParams(seed=0))
    states.set(1, SamplingParams(seed=0, presence_penalty=1.0))
    assert states.gather(one, one).logit_edits is None
    assert states.gather(one + 1, one).logit_edits is not None
    states.clear(1)
    assert states.gather(one + 1, one).logit_edits is None


@pytest.mark.parametrize("output", [[], [7], [5, 6], [5, 6, 7], [7, 5, 6, 8], [6, 7, 5]])
def test_a_bad_word_is_forbidden_where_the_output_not_the_prompt_ends_with_its_beginning(output: list[int]) -> None:
    word = (5, 6, 9)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 9] = 10.0
    token = int(on_host(logits, [([1, 5, 6], output, {"temperature": 0, "bad_words_token_ids": (word,)})]).token_ids[0])
    assert (token != 9) == (output[-2:] == [5, 6])


@pytest.mark.parametrize("words", [((5, 6, 9), (8, 8, 9)), ((8, 8, 9), (5, 6, 9))])
def test_a_word_that_does_not_match_does_not_free_the_last_token_of_one_that_does(words: tuple[tuple[int, ...], ...]) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 9] = 10.0
    assert on_host(logits, [([1], [5, 6], {"temperature": 0, "bad_words_token_ids": words})]).token_ids[0] != 9


def test_more_rows_than_are_penalised_at_once() -> None:
    logits = make_logits(70)
    rows: list[Row] = [([i % 5, 1], [i % 7] * (i % 4), {"temperature": 0, "logprobs": 5, "frequency_penalty": 1.0}) for i in range(70)]
    together = on_host(logits, rows)
    for i in (0, 3, 62, 63, 64, 67, 69):
        assert on_host(logits[i : i + 1], [rows[i]]).logprobs[0] == together.logprobs[i]


def test_rows_of_one_request_see_the_draft_tokens_before_them() -> None:
    """Draft tokens stand in the table behind the known tokens; a row's history ends where its output index says."""
    prompt, output, draft_token_ids = [1, 2], [4], [7, 7, 8]
    options: dict[str, Any] = {
        "temperature": 0,
        "logprobs": 20,
        "frequency_penalty": 1.5,
        "bad_words_token_ids": ((4, 7), (7, 8, 0), (7, 7)),
    }
    states = SamplingStates(max_num_reqs=3, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
    states.set(1, SamplingParams(seed=0, **options), num_prompt_tokens=2)
    table = torch.zeros(3, 32, dtype=torch.int32)
    table[1, :6] = torch.tensor(prompt + output + draft_token_ids)
    logits = make_logits(4)
    batch = states.gather(np.ones(4, dtype=np.int64), np.arange(1, 5))
    rows = sample(logits.clone(), batch, token_table=table, logprobs_mode="processed_logits")
    for j in range(4):
        alone = on_host(logits[j : j + 1], [(prompt, output + draft_token_ids[:j], options)])
        assert rows.logprobs[j] == alone.logprobs[0]


# ------------------------------------------------------------------ what is reported
def distribution(logits: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """[vocab_size] float64 log-probabilities after temperature, min_p, top_k and top_p, by sorting."""
    scaled = logits.double() / (options["temperature"] or 1.0)
    probs = scaled.softmax(-1)
    keep = probs >= options.get("min_p", 0.0) * probs.max()
    order = scaled.argsort(descending=True)
    if top_k := options.get("top_k"):
        keep[order[top_k:]] = False
    probs = torch.where(keep, probs, 0.0)
    probs /= probs.sum()
    keep[order[int((probs[order].cumsum(0) < options.get("top_p", 1.0) - 1e-12).sum()) + 1 :]] = False
    return scaled.masked_fill(~keep, -math.inf)


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.7, "min_p": 0.01}, None], ids=str
)
def test_logprobs_mode_says_which_numbers_are_reported(mode: Any, where: str, filters: dict[str, Any] | None) -> None:
    options = {"temperature": 0.0 if filters is None else 0.6, "logit_bias": {2: 4.0}, "logprobs": 8, **(filters or {})}
    logits = make_logits(3, seed=4)
    plain = {"temperature": 0.9}
    rows: list[Row] = [([1], [], plain), ([1], [], options), ([1], [], {"temperature": 0.0, "logprobs": 1})]
    batch, table = make_batch(rows)
    if where == "host":
        output = sample(logits.clone(), batch, token_table=table, logprobs_mode=mode)
        token, entry = int(output.token_ids[1]), output.logprobs[1]
    else:
        from aioengine.worker.sample.logprobs import make_entries

        arrays = Staging(HostTransfers()).stage(sampling_arrays(batch, np.arange(3), vocab_size=VOCAB_SIZE))
        staged = staged_sampling(arrays.groups, batch, token_table=table)
        samples = sample_on_device(logits.clone(), staged, last_sampled_tokens=torch.zeros(3, dtype=torch.int32), logprobs_mode=mode)
        ids, values, ranks = (tensor.tolist() for tensor in samples.tensors()[2:])
        token, entry = int(samples.token_ids[1]), make_entries(ids, values, ranks, staged.num_logprobs)[0]

    processed = logits[1].clone()
    processed[2] += 4.0
    scores = distribution(processed, options) if mode.startswith("processed") else logits[1].double()
    if mode.endswith("logprobs"):
        scores = scores.log_softmax(-1)
    order = scores.argsort(descending=True).tolist()
    top = [i for i in order[:8] if scores[i] > -math.inf]
    assert next(iter(entry)) == token
    assert set(entry) == {token, *top}
    for i, reported in entry.items():
        assert reported.logprob == pytest.approx(scores[i].item(), abs=1e-5)
        assert reported.rank == order.index(i) + 1


# ------------------------------------------------------------------ nothing to sample from
@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.2, "logprobs": 2}], ids=str)
@pytest.mark.parametrize(("value", "cause"), [(math.nan, "not numbers"), (math.inf, "not numbers"), (-math.inf, "no token is left")])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_row_that_cannot_be_sampled_from_fails_alone(options: dict[str, Any], value: float, cause: str, everywhere: bool) -> None:
    logits = make_logits(3)
    rows: list[Row] = [([1], [], {"seed": i, **options}) for i in range(3)]
    expected = on_host(logits, rows)
    assert expected.failed == {}
    if everywhere:
        logits[1] = value
    elif value == -math.inf:
        rows[1] = ([1], [2], {**rows[1][2], "allowed_token_ids": [4], "bad_words_token_ids": ((2, 4),)})
    else:
        logits[1, 7] = value
    output = on_host(logits, rows)
    assert list(output.failed) == [1]
    assert cause in output.failed[1]
    assert 0 <= output.token_ids[1] < VOCAB_SIZE
    assert output.token_ids[[0, 2]].tolist() == expected.token_ids[[0, 2]].tolist()


def test_what_a_grammar_calls_complete_ends_where_the_other_masks_leave_nothing() -> None:
    """On either side; not where a token is left, where the grammar asks for more, or where the logits are no numbers."""
    rows: list[Row] = [([1], [], {"temperature": 0.0, "allowed_token_ids": allowed}) for allowed in ([1], [1, 5], [1], [1])]
    logits = make_logits(len(rows))
    logits[3] = torch.nan
    bits = [bytes([0b0010_1000, 0, 0]), bytes([0b0010_1000, 0, 0]), bytes([0b0010_0000, 0, 0]), bytes([0b0010_1000, 0, 0])]  # EOS and 5
    batch, table = make_batch(rows)
    on_cpu = sample(logits.clone(), batch, token_table=table, bitmasks=dict(enumerate(bits)))
    assert on_cpu.token_ids.tolist()[:2] == [EOS, 5]
    assert sorted(on_cpu.failed) == [2, 3]

    slots = np.arange(len(rows), dtype=np.int64)
    arrays = Staging(HostTransfers()).stage(sampling_arrays(batch, slots, vocab_size=VOCAB_SIZE))
    samples = sample_on_device(
        logits.clone(),
        staged_sampling(arrays.groups, batch, token_table=table),
        last_sampled_tokens=torch.zeros(len(rows), dtype=torch.int32),
        allowed=(torch.arange(len(rows)), torch.tensor([list(row) for row in bits], dtype=torch.uint8)),
        eos_token_ids=torch.tensor([EOS]),
    )
    assert samples.token_ids.tolist()[:2] == [EOS, 5]
    assert samples.best.isfinite().tolist() == [True, True, False, False]
