"""`StructuredOutputManager`: compiles the grammars of requests, and keeps where each live request stands in its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from aioengine.sampling_params import SamplingParams, StructuredOutputsParams
from aioengine.structured_output.compiler import GrammarCompiler
from aioengine.structured_output.matcher import CompiledGrammar, GrammarMatcher
from aioengine.structured_output.vocabulary import build_vocabulary


class StructuredOutputManager:
    """Belongs to one engine, and is called in its event loop.

    `compile` leaves the work to threads, see `GrammarCompiler`; the vocabulary is built for the first request that needs it.
    `add`, `accept`, `bitmask` and `remove` are for live requests, by id; a mask takes 5-150 us, the first ones of a large
    grammar some milliseconds.

    tokenizer, vocab_size, eos_token_ids: as for `build_vocabulary`.
    """

    def __init__(self, tokenizer: object | None, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        known = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        build = partial(build_vocabulary, tokenizer, vocab_size=vocab_size, eos_token_ids=known)
        self._compiler = GrammarCompiler(build, eos_token_ids=known)
        self._matchers: dict[str, GrammarMatcher] = {}

    # ------------------------------------------------------------------ grammars
    async def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Raises InvalidRequestError saying what is wrong with the schema, regular expression or grammar; EngineDeadError;
        EngineOverloadedError if too many grammars that take long are being compiled."""
        return await self._compiler.compile(params)

    def shutdown(self) -> None:
        """Forget all requests, and compile nothing more. Idempotent."""
        self._compiler.shutdown()
        self._matchers.clear()

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

    def accept(self, request_id: str, token_ids: Sequence[int]) -> str | None:
        """These are the request's next tokens. Returns why they do not match, if they do not; None without a grammar."""
        matcher = self._matchers.get(request_id)
        return None if matcher is None else matcher.accept(token_ids)

    def bitmask(self, request_id: str) -> bytes:
        """Which token may come next, see `GrammarMatcher`. Raises GrammarError: the request cannot go on."""
        return self._matchers[request_id].bitmask()

    def remove(self, request_id: str) -> None:
        """The request has ended. Unknown ids are ignored."""
        self._matchers.pop(request_id, None)
