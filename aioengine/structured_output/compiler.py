"""Compiles grammars beside the event loop, so that one which takes long is a problem of its own request alone."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from aioengine.errors import EngineDeadError, EngineOverloadedError, InvalidRequestError
from aioengine.sampling_params import StructuredOutputsParams
from aioengine.structured_output.compile_thread import CompileThread
from aioengine.structured_output.grammar import grammar_text, kind_of
from aioengine.structured_output.matcher import CompiledGrammar, explain
from aioengine.structured_output.probe import is_hopeless
from aioengine.structured_output.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_CACHED_GRAMMARS = 32
"""Compiled grammars that are kept for later requests, the ones used last."""

COMPILE_TIMEOUT_S = 10.0
"""A grammar that is not compiled by then is refused."""

SLOW_COMPILE_S = 0.1
"""A compile that takes longer does not hold up the next one any more."""

MAX_FAST_COMPILES = 2
MAX_RUNNING_COMPILES = 8
"""Those that were given up included: their threads end when the native code does, which nothing can interrupt."""

MAX_LARK_SYMBOLS = 10_000
"""Symbols in the productions of a Lark grammar. The work for an ambiguous one grows with the square, or worse."""


class GrammarCompiler:
    """Belongs to one event loop. A grammar that is wanted twice at a time is compiled once; cached ones come at once.

    build_vocabulary: called once, in a thread, when the first request needs it.
    """

    def __init__(self, build_vocabulary: Callable[[], Vocabulary], *, eos_token_ids: frozenset[int]) -> None:
        self._build_vocabulary = build_vocabulary
        self._eos_token_ids = eos_token_ids
        self._is_shut_down = False
        self._vocabulary: asyncio.Future[Vocabulary] | None = None
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._in_flight: dict[str, asyncio.Future[CompiledGrammar]] = {}  # by text
        self._tasks: set[asyncio.Task[None]] = set()
        self._too_slow: dict[str, CompileThread[CompiledGrammar]] = {}  # given up, their threads still run
        self._num_running = 0
        self._may_start = asyncio.Semaphore(MAX_FAST_COMPILES)

    async def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Raises InvalidRequestError saying what is wrong with the grammar, EngineOverloadedError, EngineDeadError."""
        self._check_runs()
        # Also this is in proportion to the size of a schema, and thus not for the loop's thread; it never takes long.
        text = await CompileThread(partial(grammar_text, params), name="aioengine-grammar-text").done
        self._check_runs()
        if (grammar := self._cached(text)) is not None:
            return grammar
        if text not in self._in_flight:
            self._start(text, kind_of(params))
        return await asyncio.shield(self._in_flight[text])  # whoever else waits for it goes on when this one gives up

    def shutdown(self) -> None:
        """Whoever waits gets an EngineDeadError. Threads in native code are left to end by themselves. Idempotent."""
        self._is_shut_down = True
        for future in self._in_flight.values():
            if not future.done():
                future.set_exception(EngineDeadError("the engine was shut down"))
        for task in self._tasks:
            task.cancel()

    def _check_runs(self) -> None:
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down")

    # ------------------------------------------------------------------ the cache
    def _cached(self, text: str) -> CompiledGrammar | None:
        grammar = self._cache.get(text)
        if grammar is not None:
            self._cache.move_to_end(text)
        return grammar

    def _keep(self, text: str, grammar: CompiledGrammar) -> None:
        self._cache[text] = grammar
        while len(self._cache) > MAX_CACHED_GRAMMARS:
            self._cache.popitem(last=False)

    # ------------------------------------------------------------------ one compile
    def _start(self, text: str, kind: str) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[CompiledGrammar] = loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # all who wait may be gone
        self._in_flight[text] = future
        task = loop.create_task(self._settle(future, text, kind), name="aioengine-compile-grammar")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(self, future: asyncio.Future[CompiledGrammar], text: str, kind: str) -> None:
        try:
            grammar = await self._compile(text, kind)
        except asyncio.CancelledError:
            future.cancel()  # unless `shutdown` has said more
            raise
        except Exception as exc:
            if not future.done():
                future.set_exception(exc)
        else:
            self._keep(text, grammar)
            if not future.done():
                future.set_result(grammar)
        finally:
            del self._in_flight[text]

    async def _compile(self, text: str, kind: str) -> CompiledGrammar:
        too_slow = InvalidRequestError(f"structured_outputs.{kind} takes more than {COMPILE_TIMEOUT_S:g} s to compile")
        if text in self._too_slow:
            raise too_slow
        vocabulary = await self._get_vocabulary()
        await self._may_start.acquire()
        try:
            if self._num_running >= MAX_RUNNING_COMPILES:
                raise EngineOverloadedError(
                    f"{self._num_running} grammars are being compiled, and at most {MAX_RUNNING_COMPILES} may be: they take long"
                )
            build = partial(build_grammar, vocabulary, text, kind, eos_token_ids=self._eos_token_ids)
            thread = CompileThread(build, name="aioengine-grammar")
            self._num_running += 1
            thread.done.add_done_callback(partial(self._on_ended, text))
            await asyncio.wait([thread.done], timeout=SLOW_COMPILE_S)
        finally:
            self._may_start.release()
        if not thread.done.done():
            thread.give_way()
            await asyncio.wait([thread.done], timeout=COMPILE_TIMEOUT_S - SLOW_COMPILE_S)
        if not thread.done.done():
            self._too_slow[text] = thread
            raise too_slow
        return thread.done.result()

    def _on_ended(self, text: str, done: asyncio.Future[CompiledGrammar]) -> None:
        self._num_running -= 1
        given_up = self._too_slow.pop(text, None)
        if given_up is not None and not done.cancelled() and done.exception() is None:
            self._keep(text, done.result())  # too late for those who waited, not for those who ask again

    async def _get_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = CompileThread(self._build_vocabulary, name="aioengine-vocabulary").done
        return await asyncio.shield(self._vocabulary)


def build_grammar(vocabulary: Vocabulary, text: str, kind: str, *, eos_token_ids: frozenset[int]) -> CompiledGrammar:
    """In a thread, as all that a long grammar makes long. Raises InvalidRequestError."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, max_grammar_size=MAX_LARK_SYMBOLS if kind == "grammar" else None)
    matcher = LLMatcher(vocabulary.trie, text, log_level=0, limits=limits)
    # The first mask is computed here for two reasons: some errors, such as a grammar that matches nothing, show only
    # then, and what it takes to compute it is kept for all that start from this matcher.
    num_mask_bytes = 0 if matcher.is_error() else len(matcher.compute_bitmask())
    _raise_error(matcher, kind)
    grammar = CompiledGrammar(matcher, eos_token_ids, num_mask_bytes=num_mask_bytes, vocabulary=vocabulary)
    if (cause := is_hopeless(grammar)) is not None:
        raise InvalidRequestError(f"structured_outputs.{kind} cannot be used: {cause}")
    return grammar


def _raise_error(matcher: LLMatcher, kind: str) -> None:
    if matcher.is_error():
        raise InvalidRequestError(f"structured_outputs.{kind} cannot be used: {explain(matcher.get_error())}")
