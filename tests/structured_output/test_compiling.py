"""A grammar that takes long to compile, or for ever, is a problem of its own request alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from aioengine.errors import EngineDeadError, EngineOverloadedError, InvalidRequestError
from aioengine.sampling_params import SamplingParams, StructuredOutputsParams
from aioengine.structured_output import compiler, matcher
from aioengine.structured_output.compiler import MAX_FAST_COMPILES, MAX_RUNNING_COMPILES, build_grammar
from aioengine.structured_output.manager import StructuredOutputManager
from aioengine.structured_output.matcher import GrammarError
from aioengine.testing import EOS_TOKEN_ID, FakeTokenizer
from tests.structured_output.vocabularies import allowed
from tests.waiting import until

SLOW = "slow"


def regex(text: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=text)


class Gate:
    """Grammars with `SLOW` in them are compiled when the gate is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.built: list[str] = []

    def build(self, vocabulary: Any, text: str, kind: str, **options: Any) -> Any:
        self.built.append(text)
        if SLOW in text:
            self.opened.wait(20)
        return build_grammar(vocabulary, text, kind, **options)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(compiler, "build_grammar", made.build)
    monkeypatch.setattr(compiler, "SLOW_COMPILE_S", 0.02)
    yield made
    made.opened.set()


@pytest.fixture
def manager() -> Iterator[StructuredOutputManager]:
    made = StructuredOutputManager(FakeTokenizer(), vocab_size=261, eos_token_ids=frozenset({EOS_TOKEN_ID}))
    yield made
    made.shutdown()


async def test_slow_grammars_hold_up_neither_cached_nor_new_ones(manager: StructuredOutputManager, gate: Gate) -> None:
    cached = await manager.compile(regex("cached"))
    slow = [asyncio.create_task(manager.compile(regex(f"{SLOW}{n}"))) for n in range(MAX_FAST_COMPILES + 2)]
    await asyncio.sleep(0.01)
    assert await asyncio.wait_for(manager.compile(regex("cached")), 2) is cached
    await asyncio.wait_for(manager.compile(regex("new")), 5)
    assert not any(task.done() for task in slow)
    gate.opened.set()
    await asyncio.wait_for(asyncio.gather(*slow), 5)


async def test_what_is_wanted_twice_at_a_time_is_compiled_once(manager: StructuredOutputManager, gate: Gate) -> None:
    twins = [asyncio.create_task(manager.compile(regex(SLOW))) for _ in range(5)]
    await asyncio.sleep(0.05)
    twins[0].cancel()
    await asyncio.wait(twins[:1], timeout=1)
    assert twins[0].cancelled(), "whoever gives up does not wait"
    gate.opened.set()
    grammars = await asyncio.wait_for(asyncio.gather(*twins[1:]), 5)
    assert len({id(grammar) for grammar in grammars}) == 1
    assert len(gate.built) == 1


async def test_a_time_limit(manager: StructuredOutputManager, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT_S", 0.1)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=r"structured_outputs.regex takes more than 0.1 s to compile"):
            await asyncio.wait_for(manager.compile(regex(SLOW)), 5)
    assert len(gate.built) == 1, "the second one is refused at once, while the thread of the first is still at it"
    gate.opened.set()
    await until(lambda: not manager._compiler._too_slow)
    await manager.compile(regex(SLOW))
    assert len(gate.built) == 1, "what came too late is there for those who ask again"


async def test_no_more_than_so_many_threads(manager: StructuredOutputManager, gate: Gate) -> None:
    slow = [asyncio.create_task(manager.compile(regex(f"{SLOW}{n}"))) for n in range(MAX_RUNNING_COMPILES)]
    await until(lambda: len(gate.built) == MAX_RUNNING_COMPILES)
    with pytest.raises(EngineOverloadedError, match=f"at most {MAX_RUNNING_COMPILES}"):
        await manager.compile(regex("one more"))
    gate.opened.set()
    await asyncio.wait_for(asyncio.gather(*slow), 5)
    await manager.compile(regex("one more"))


async def test_shutdown_does_not_wait(manager: StructuredOutputManager, gate: Gate) -> None:
    tasks = [asyncio.create_task(manager.compile(regex(f"{SLOW}{n}"))) for n in range(4)]
    await asyncio.sleep(0.05)
    manager.shutdown()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 1)
    assert [type(result) for result in results] == [EngineDeadError] * 4
    with pytest.raises(EngineDeadError):
        await manager.compile(regex("late"))


HOPELESS = """
import asyncio, time
from aioengine.errors import InvalidRequestError
from aioengine.sampling_params import StructuredOutputsParams
from aioengine.structured_output import compiler, matcher
from aioengine.structured_output.manager import StructuredOutputManager
from aioengine.testing import FakeTokenizer

def ambiguous(n):
    pairs = " | ".join(f"r{j} r{(j + 1) % n}" for j in range(n))
    return "\\n".join(["start: r0", *(f'r{i}: {pairs} | "x" | ""' for i in range(n))])

async def main():
    compiler.COMPILE_TIMEOUT_S = 0.3
    manager = StructuredOutputManager(FakeTokenizer(), vocab_size=261, eos_token_ids=frozenset({256}))
    await manager.compile(StructuredOutputsParams(regex="a"))
    hopeless = asyncio.create_task(manager.compile(StructuredOutputsParams(grammar=ambiguous(65))))
    await asyncio.sleep(0.1)
    start = time.perf_counter()
    await manager.compile(StructuredOutputsParams(regex="a"))
    await manager.compile(StructuredOutputsParams(regex="b"))
    print("others waited", time.perf_counter() - start)
    try:
        await hopeless
    except InvalidRequestError as exc:
        print(exc)
    print("main ends", time.time(), flush=True)

asyncio.run(main())
"""


def test_a_hopeless_grammar_does_not_keep_others_or_the_process() -> None:
    """A real one: an ambiguous Lark grammar whose first step takes the parser seconds."""
    done = subprocess.run([sys.executable, "-c", HOPELESS], capture_output=True, text=True, timeout=60, check=False)
    ended = time.time()
    assert done.returncode == 0, done.stderr
    waited, refused, main_ended = done.stdout.splitlines()
    assert float(waited.split()[-1]) < 1.0
    assert refused == "structured_outputs.grammar takes more than 0.3 s to compile"
    assert ended - float(main_ended.split()[-1]) < 2.0, "the process ends at once"


async def test_a_grammar_that_is_too_large_is_refused_by_its_size(manager: StructuredOutputManager) -> None:
    rules = "\n".join(f"r{i}: {' | '.join(f'r{j} r{j}' for j in range(100))}" for i in range(100))
    with pytest.raises(InvalidRequestError, match=r"structured_outputs.grammar cannot be used: .*number of symbols.* too big"):
        await asyncio.wait_for(manager.compile(StructuredOutputsParams(grammar=f"start: r0\n{rules}")), 5)


async def test_a_choice_of_twenty_thousand_texts_can_be_made(manager: StructuredOutputManager) -> None:
    texts = [f"option {number} of many" for number in range(20_000)]
    grammar = await manager.compile(StructuredOutputsParams(choice=texts))
    for text in texts[:: 20_000 // 3]:
        state = grammar.start(SamplingParams())
        for token_id in text.encode():
            assert token_id in allowed(state.bitmask())
            assert state.accept([token_id]) is None
        assert state.is_complete or EOS_TOKEN_ID in allowed(state.bitmask())


@pytest.mark.parametrize("before", ["", '"in front" ', '("a" | "b") '])
async def test_what_is_bound_to_fail_in_generation_is_refused_when_it_is_submitted(manager: StructuredOutputManager, before: str) -> None:
    too_many = " | ".join(f'"option {number}" x' for number in range(2_500))
    with pytest.raises(InvalidRequestError, match=r"structured_outputs.grammar cannot be used: .*items; max is 2000"):
        await manager.compile(StructuredOutputsParams(grammar=f'start: {before}item\nitem: {too_many}\nx: "x"'))


async def test_a_grammar_whose_masks_take_too_long_is_refused(manager: StructuredOutputManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests of a step wait for its masks."""
    grammar = await manager.compile(regex("fast"))
    monkeypatch.setattr(matcher, "MAX_MASK_S", 0.0)
    with pytest.raises(InvalidRequestError, match=r"structured_outputs.regex cannot be used: it took .* s to find out what may come next"):
        await manager.compile(regex("slow"))
    with pytest.raises(GrammarError, match="at most 0 s are given"):
        grammar.start(SamplingParams()).bitmask()
