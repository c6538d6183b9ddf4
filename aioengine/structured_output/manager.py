"""`StructuredOutputManager`: compiles the grammars of requests, and keeps where each live request stands in its own."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from aioengine.errors import EngineDeadError, InvalidRequestError
from aioengine.sampling_params import SamplingParams, StructuredOutputsParams
from aioengine.structured_output.grammar import grammar_text, kind_of
from aioengine.structured_output.matcher import CompiledGrammar, GrammarMatcher, explain
from aioengine.structured_output.vocabulary import build_vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_CACHED_GRAMMARS = 32
"""Compiled grammars that are kept for later requests, the ones used last."""

COMPILE_STACK_BYTES = 64 << 20
"""Of the compiling thread, see `grammar.MAX_RULES`. Only what is used takes memory."""


class StructuredOutputManager:
    """Belongs to one engine, and is called in its event loop.

    `compile` runs in a thread of its own, which is started by the first request that needs it, and which builds the
    vocabulary then. `add`, `accept`, `bitmask` and `remove` are for live requests, by id; a mask takes 5-150 us, the first
    ones of a large grammar some milliseconds.

    tokenizer, vocab_size, eos_token_ids: as for `build_vocabulary`.
    """

    def __init__(self, tokenizer: object | None, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._is_shut_down = False
        self._compiler: ThreadPoolExecutor | None = None
        # These two belong to the compiling thread.
        self._vocabulary: LLTokenizer | None = None
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._matchers: dict[str, GrammarMatcher] = {}

    # ------------------------------------------------------------------ grammars
    async def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Raises InvalidRequestError saying what is wrong with the schema, regular expression or grammar; EngineDeadError."""
        return await asyncio.wrap_future(self._submit(params))

    def _submit(self, params: StructuredOutputsParams) -> Future[CompiledGrammar]:
        self._check_runs()
        if self._compiler is None:
            self._compiler = ThreadPoolExecutor(1, thread_name_prefix="aioengine-grammar")
        # The size counts for threads that start meanwhile: the compiler's, with its first work.
        usual = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            return self._compiler.submit(self._compile, params)
        finally:
            threading.stack_size(usual)

    def _compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """In the compiling thread, as all that a long grammar makes long."""
        self._check_runs()
        text = grammar_text(params)
        grammar = self._cache.pop(text, None)
        if grammar is None:
            grammar = self._build(text, kind_of(params))
        self._cache[text] = grammar  # at the end: used last
        while len(self._cache) > MAX_CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        return grammar

    def _build(self, text: str, kind: str) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        if self._vocabulary is None:
            self._vocabulary = build_vocabulary(self._tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)
        matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
        # The first mask is computed here for two reasons: some errors, such as a grammar that matches nothing, show only
        # then, and what it takes to compute it is kept for all that start from this matcher.
        num_mask_bytes = 0 if matcher.is_error() else len(matcher.compute_bitmask())
        if matcher.is_error():
            raise InvalidRequestError(f"structured_outputs.{kind} cannot be used: {explain(matcher.get_error())}")
        return CompiledGrammar(matcher, self._eos_token_ids, num_mask_bytes=num_mask_bytes)

    def shutdown(self) -> None:
        """Forget all requests, and compile nothing more: what is being compiled is finished by its thread. Idempotent."""
        self._is_shut_down = True
        if self._compiler is not None:
            self._compiler.shutdown(wait=False)
        self._matchers.clear()

    def _check_runs(self) -> None:
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down")

    # ------------------------------------------------------------------ live requests
    def __contains__(self, request_id: str) -> bool:
        return request_id in self._matchers

    def __len__(self) -> int:
        """How many live requests have a grammar."""
        return len(self._matchers)

    def add(self, request_id: str, grammar: CompiledGrammar, params: SamplingParams) -> None:
        """A request whose output has to match `grammar`, from its first token on."""
        assert request_id not in self._matchers, f"request {request_id!r} has a grammar already"
        self._matchers[request_id] = grammar.start(params)

    def accept(self, request_id: str, token_ids: Sequence[int]) -> None:
        """These are the request's next tokens. Ignored for requests without a grammar."""
        matcher = self._matchers.get(request_id)
        if matcher is not None:
            matcher.accept(token_ids)

    def bitmask(self, request_id: str) -> bytes:
        """Which token may come next, see `GrammarMatcher`. Raises GrammarError: the request cannot go on."""
        return self._matchers[request_id].bitmask()

    def remove(self, request_id: str) -> None:
        """The request has ended. Unknown ids are ignored."""
        self._matchers.pop(request_id, None)
