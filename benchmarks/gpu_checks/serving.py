"""What serving has to do right on a GPU besides greedy tokens, through the engine on a model of random weights.

Run by `benchmarks/gpu_check.py`. Every check has an oracle that is no GPU: the CPU engine on the same weights, or arithmetic on what
was reported.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from aioengine_kernels.launcher import count_variants
from gpu_checks.engine import GRAMMAR_MODULUS, Ask, RandomEngine, Run, TokenCheck, compare_tokens, random_prompts

Gap = Callable[[list[int], int], float]


@dataclass(frozen=True, slots=True)
class ServingCheck:
    """One property of serving; the message says what was found."""

    name: str
    passed: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class ServingSizes:
    """How large the checks are; the small ones are for rehearsing in Triton's interpreter."""

    long_context: int
    num_companions: int  # prompts and short decodes beside it
    num_soak_requests: int
    soak_steps: int  # at least
    sync_steps: int  # at least
    max_tokens: int


def check_serving(engine: RandomEngine, cpu: RandomEngine, *, gap: Gap, sizes: ServingSizes, limit: float) -> Iterator[ServingCheck]:
    """Every check once; one that raises is a failed one. limit: how far logits of the two engines may be apart."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("log-probabilities as on the CPU", lambda: _logprobs(engine, cpu, sizes, limit)),
        ("sampled tokens are within their filters", lambda: _filters(engine, sizes)),
        ("seeded tokens do not depend on batch mates", lambda: _seeds(engine, sizes)),
        ("penalties, biases and bad words as on the CPU", lambda: _edits(engine, cpu, gap, sizes, limit)),
        ("a grammar's masks beside free requests", lambda: _grammar(engine, cpu, gap, sizes, limit)),
        ("a NaN row fails alone", lambda: _nan_row(engine, sizes)),
        ("a long context among prompts and short decodes", lambda: _long_context(engine, cpu, gap, sizes, limit)),
        ("no call waits for the device", lambda: _no_waits(engine, sizes)),
    ]
    before = count_variants()
    for name, check in checks:
        try:
            message = check()
        except Exception as exc:  # the others are still worth a look
            yield ServingCheck(name, passed=False, message=f"{type(exc).__name__}: {exc}"[:2000])
        else:
            yield ServingCheck(name, passed=True, message=message)
    after = count_variants()
    new = {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}
    yield ServingCheck("nothing is compiled while serving", passed=not new, message=f"{sum(after.values())} variants, new: {new or 'none'}")


def _prompts(engine: RandomEngine, num: int, *, seed: int) -> list[list[int]]:
    return [random_prompts(1, 3 + 11 * i, vocab_size=engine.vocab_size, seed=seed + i)[0] for i in range(num)]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _compare(expected: Run, actual: Run, asks: list[Ask], gap: Gap, limit: float) -> str:
    check = compare_tokens("", expected, actual, prompts=[ask.prompt for ask in asks], gap=gap, limit=limit)
    _require(check.passed, f"{check.num_equal} of {check.num_tokens} tokens equal, {check.worst_gap:g} below the best, limit {limit:g}")
    return f"{check.num_equal} of {check.num_tokens} tokens equal"


def _logprobs(engine: RandomEngine, cpu: RandomEngine, sizes: ServingSizes, limit: float) -> str:
    """Of sampled and prompt tokens. Where two tokens part, the histories differ and nothing more is compared."""
    params = {"max_tokens": sizes.max_tokens, "logprobs": 4, "prompt_logprobs": 3}
    asks = [Ask(prompt, params) for prompt in _prompts(engine, 3, seed=10)]
    ours, theirs = engine.serve(asks), cpu.serve(asks)
    worst, count = 0.0, 0
    for i, ask in enumerate(asks):
        _require(
            len(ours.prompt_logprobs[i]) == len(ask.prompt) - 1, f"{len(ours.prompt_logprobs[i])} entries for {len(ask.prompt)} tokens"
        )
        same = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours.token_ids[i], theirs.token_ids[i], strict=True))
        )
        entries = [*zip(ours.prompt_logprobs[i], theirs.prompt_logprobs[i], strict=True)]
        entries += [*zip(ours.logprobs[i][:same], theirs.logprobs[i][:same], strict=True)]
        for mine, wanted in entries:
            for token in mine.keys() & wanted.keys():
                worst, count = max(worst, abs(mine[token].logprob - wanted[token].logprob)), count + 1
    _require(count > 0, "nothing was compared")
    _require(worst <= limit, f"{worst:g} apart, limit {limit:g}")
    return f"{count} compared, at most {worst:.2g} apart"


def _filters(engine: RandomEngine, sizes: ServingSizes) -> str:
    """By the reported ranks and log-probabilities of what was sampled, which are those before the filters."""
    rows: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.3},
        {"min_p": 0.2},
        {"top_k": 12, "top_p": 0.6, "min_p": 0.05, "temperature": 1.5},
        {"temperature": 0.0, "top_k": 3},
    ]
    common = {"max_tokens": sizes.max_tokens, "logprobs": 20, "temperature": 1.0}
    asks = [Ask(prompt, {**common, "seed": i, **rows[i]}) for i, prompt in enumerate(_prompts(engine, len(rows), seed=20))]
    run, count = engine.serve(asks), 0
    for i, ask in enumerate(asks):
        temperature, top_k = ask.params["temperature"], ask.params.get("top_k", engine.vocab_size)
        for token, entry in zip(run.token_ids[i], run.logprobs[i], strict=True):
            chosen, best = entry[token], max(value.logprob for value in entry.values())
            _require(chosen.rank <= (1 if temperature == 0 else top_k), f"{ask.params}: rank {chosen.rank}")
            if "min_p" in ask.params:
                floor = best + temperature * math.log(ask.params["min_p"])
                _require(chosen.logprob >= floor - 1e-4, f"{ask.params}: {chosen.logprob:g} is below {floor:g}")
            if "top_p" in ask.params and "top_k" not in ask.params:
                above = sum(math.exp(value.logprob) for value in entry.values() if value.logprob > chosen.logprob)
                _require(above <= ask.params["top_p"] + 1e-4, f"{ask.params}: {above:g} of the mass is above")
            count += 1
    return f"{count} tokens"


def _seeds(engine: RandomEngine, sizes: ServingSizes) -> str:
    """The same request alone and among others; alone twice. Among others a near tie may fall otherwise, so most tokens must agree."""
    params = {"max_tokens": sizes.max_tokens, "temperature": 0.8, "seed": 77, "top_p": 0.9}
    prompts = _prompts(engine, 3, seed=30)
    asks = [Ask(prompt, {**params, "seed": 77 + i}) for i, prompt in enumerate(prompts)]
    alone, again, together = engine.serve(asks[1:2]), engine.serve(asks[1:2]), engine.serve(asks)
    _require(alone.token_ids == again.token_ids, "alone twice, and other tokens")
    _require(alone.token_ids[0][0] == together.token_ids[1][0], "another first token among others")
    return f"{sizes.max_tokens} tokens"


def _edits(engine: RandomEngine, cpu: RandomEngine, gap: Gap, sizes: ServingSizes, limit: float) -> str:
    rows: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"allowed_token_ids": list(range(5, 60))},
        {"logit_bias": {11: 4.0, 12: -3.0}, "bad_words_token_ids": ((11, 11), (5,))},
    ]
    params = {"max_tokens": sizes.max_tokens, "logprobs": 0}
    asks = [Ask(prompt, {**params, **row}) for prompt, row in zip(_prompts(engine, 3, seed=40), rows, strict=True)]
    ours, theirs = engine.serve(asks), cpu.serve(asks)
    same = sum(mine == other for mine, other in zip(ours.token_ids, theirs.token_ids, strict=True))
    for i, (mine, other) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
        part = next((place for place, pair in enumerate(zip(mine, other, strict=True)) if pair[0] != pair[1]), None)
        if part is not None:  # the edited logits of the two tokens, by the CPU's raw ones: a near tie, or an error
            history = asks[i].prompt + other[:part]
            apart = abs(gap(history, mine[part]) - gap(history, other[part]))
            _require(apart <= limit + 1.0, f"{rows[i]}: {mine[part]} instead of {other[part]}, {apart:g} apart")
    _require(set(ours.token_ids[1]) <= set(range(5, 60)), "a token that is not allowed")
    return f"{same} of {len(asks)} outputs equal"


def _grammar(engine: RandomEngine, cpu: RandomEngine, gap: Gap, sizes: ServingSizes, limit: float) -> str:
    prompts = _prompts(engine, 4, seed=50)
    asks = [Ask(prompt, {"max_tokens": sizes.max_tokens}, has_grammar=i % 2 == 0) for i, prompt in enumerate(prompts)]
    run, free = engine.serve(asks), cpu.serve(asks)
    for i, ask in enumerate(asks):
        if ask.has_grammar:
            _require(all(token % GRAMMAR_MODULUS == n % GRAMMAR_MODULUS for n, token in enumerate(run.token_ids[i])), "a masked token")
    rest = [i for i, ask in enumerate(asks) if not ask.has_grammar]
    expected, actual = (Run([source.token_ids[i] for i in rest]) for source in (free, run))
    return _compare(expected, actual, [asks[i] for i in rest], gap, limit)


def _nan_row(engine: RandomEngine, sizes: ServingSizes) -> str:
    """A token whose embedding is NaN, in the prompt of one of three. Its blocks are reused afterwards."""
    prompts = _prompts(engine, 3, seed=60)
    poison = next(token for token in range(engine.vocab_size) if all(token not in prompt for prompt in prompts))
    never = {"bad_words_token_ids": ((poison,),)}  # or a healthy request could sample it
    rows: list[dict[str, Any]] = [
        never,
        {"top_p": 0.9, "top_k": 20, "temperature": 0.7, "logprobs": 2},
        {"temperature": 0.7, "top_p": 0.8, **never},
    ]

    def serve(middle: list[int]) -> Run:
        chosen = [prompts[0], middle, prompts[2]]
        return engine.serve([Ask(prompt, {"max_tokens": sizes.max_tokens, **row}) for prompt, row in zip(chosen, rows, strict=True)])

    healthy = serve(prompts[1])
    before = _replace_embedding(engine, poison, math.nan)
    try:
        run = serve([*prompts[1][:-1], poison])
    finally:
        _replace_embedding(engine, poison, before)
    _require(run.finish_reasons.get(1) == "error", f"the NaN row ended with {run.finish_reasons.get(1)!r}")
    _require("not numbers" in run.errors.get(1, ""), f"the error says {run.errors.get(1)!r}")
    for i in (0, 2):
        _require(len(run.token_ids[i]) == sizes.max_tokens, f"request {i} beside it got {len(run.token_ids[i])} tokens")
        _require(run.token_ids[i][0] == healthy.token_ids[i][0], f"request {i} beside it got another token")
    again = serve(prompts[1])
    _require(not again.errors, f"after it: {again.errors}")
    return run.errors[1]


def _replace_embedding(engine: RandomEngine, token: int, value: Any) -> Any:
    """Returns what was there."""

    @torch.no_grad()
    def change(worker: Any) -> Any:
        weight = next(parameter for name, parameter in worker._model.named_parameters() if "embed_tokens" in name)
        before = weight[token].clone()
        weight[token] = value
        return before

    return engine.call_model(change)


def _long_context(engine: RandomEngine, cpu: RandomEngine, gap: Gap, sizes: ServingSizes, limit: float) -> str:
    """It decodes, split over the device, while chunks of prompts and short decodes come and go."""
    long_prompt = random_prompts(1, sizes.long_context, vocab_size=engine.vocab_size, seed=70)[0]
    asks = [Ask(long_prompt, {"max_tokens": sizes.max_tokens})]
    asks += [Ask(prompt, {"max_tokens": 2 + i % 3}) for i, prompt in enumerate(_prompts(engine, sizes.num_companions, seed=71))]
    return _compare(cpu.serve(asks, concurrency=3), engine.serve(asks, concurrency=3), asks, gap, limit)


def _no_waits(engine: RandomEngine, sizes: ServingSizes) -> str:
    """Under `torch.cuda.set_sync_debug_mode("error")`, which raises where a call would wait for the device; with every feature at once."""
    rows: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 3},
        {"prompt_logprobs": 2, "repetition_penalty": 1.2, "min_tokens": 2, "stop_token_ids": [1]},
        {"allowed_token_ids": list(range(2, 40)), "logit_bias": {7: 1.0}, "bad_words_token_ids": ((3,), (4, 5))},
    ]
    num_steps, rounds = 0, 0
    is_gpu = engine.config.worker.device == "cuda"
    while num_steps < sizes.sync_steps:
        prompts = _prompts(engine, len(rows), seed=80 + rounds)
        asks = [
            Ask(p, {"max_tokens": sizes.max_tokens, **row}, has_grammar=i == 0)
            for i, (p, row) in enumerate(zip(prompts, rows, strict=True))
        ]
        if is_gpu:
            torch.cuda.set_sync_debug_mode("error")
        try:
            num_steps += engine.serve(asks).num_steps
        finally:
            if is_gpu:
                torch.cuda.set_sync_debug_mode("default")
        rounds += 1
    return f"{num_steps} steps{'' if is_gpu else '; there is no device to wait for here'}"


# ------------------------------------------------------------------ long runs
def soak_asks(engine: RandomEngine, num: int, *, max_tokens: int, seed: int = 0) -> list[Ask]:
    """Greedy requests of all lengths that fit, of which every fifth is aborted on its way."""
    rng = random.Random(seed)
    limit = engine.config.scheduler.max_model_len
    asks = []
    for i in range(num):
        count = rng.randint(1, max_tokens)
        length = rng.randint(1, max(1, min(limit - count - 1, limit // 2)))
        prompt = [rng.randrange(engine.vocab_size) for _ in range(length)]
        asks.append(Ask(prompt, {"max_tokens": count}, abort_after=rng.randint(1, count) if i % 5 == 4 else None))
    return asks


def check_long_runs(engine: RandomEngine, *, gap: Gap, sizes: ServingSizes, limit: float) -> Iterator[TokenCheck]:
    """The same requests in graphs, eagerly and one step at a time, over preemptions and aborts: the tokens of the first, or near ties."""
    concurrency = engine.config.scheduler.max_num_seqs
    asks = soak_asks(engine, sizes.num_soak_requests, max_tokens=4 * sizes.max_tokens)
    first = engine.serve(asks, concurrency=concurrency)
    while first.num_steps < sizes.soak_steps:
        asks += soak_asks(engine, sizes.num_soak_requests, max_tokens=4 * sizes.max_tokens, seed=len(asks))
        first = engine.serve(asks, concurrency=concurrency)
    prompts = [ask.prompt for ask in asks]
    name = f"{first.num_steps} steps, {first.num_preemptions} preemptions, {sum(ask.abort_after is not None for ask in asks)} aborts"
    # Without preemptions the pool is too large for the check to mean anything.
    missing = 0.0 if first.num_preemptions else math.inf
    yield TokenCheck(f"{name}, {engine.num_graphs} graphs", sum(map(len, first.token_ids)), sum(map(len, first.token_ids)), missing, limit)
    others = (("eager", False, True), ("no overlap", True, False), ("eager, no overlap", False, False))
    for label, use_graphs, overlap in others if engine.num_graphs else others[1:2]:
        engine.use_graphs(use_graphs)
        other = engine.serve(asks, overlap=overlap, concurrency=concurrency)
        shortest = [
            min(len(a), len(b)) for a, b in zip(first.token_ids, other.token_ids, strict=True)
        ]  # of aborted ones some more may come
        mine, theirs = (Run([tokens[:n] for tokens, n in zip(run.token_ids, shortest, strict=True)]) for run in (first, other))
        yield compare_tokens(f"{name}, {label}", mine, theirs, prompts=prompts, gap=gap, limit=limit)
    engine.use_graphs(True)
