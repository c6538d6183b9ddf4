"""Grammars as requests bring them: what is taken, what is refused at the door, and how a matcher behaves at the end."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from aioengine.errors import InvalidRequestError
from aioengine.sampling_params import SamplingParams, StructuredOutputsParams
from aioengine.structured_output.compile_thread import STACK_BYTES
from aioengine.structured_output.compiler import MAX_CACHED_GRAMMARS
from aioengine.structured_output.grammar import MAX_GRAMMAR_CHARS, MAX_RULES
from aioengine.structured_output.manager import StructuredOutputManager
from aioengine.structured_output.matcher import GrammarError, GrammarMatcher
from aioengine.testing import EOS_TOKEN_ID, FakeTokenizer

EOS = {EOS_TOKEN_ID}


@pytest.fixture
def manager() -> Iterator[StructuredOutputManager]:
    made = StructuredOutputManager(FakeTokenizer(), vocab_size=261, eos_token_ids=frozenset(EOS))
    yield made
    made.shutdown()


def allowed(bitmask: bytes) -> set[int]:
    return {token_id for token_id in range(len(bitmask) * 8) if bitmask[token_id // 8] >> token_id % 8 & 1}


def matches(matcher: GrammarMatcher, text: str) -> bool:
    """The whole text, byte by byte, and then the end, are allowed."""
    for token_id in text.encode():
        if token_id not in allowed(matcher.bitmask()):
            return False
        matcher.accept([token_id])
    return allowed(matcher.bitmask()) >= EOS


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AWKWARD = ['q"', "b\\s", "\n", "\x7f\x00", "é🙂", "{x}", "/a/", "<|user|>"]
LARK = r"""
start: sum
sum: product ("+" product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]+/
"""


@pytest.mark.parametrize(
    ("params", "good", "bad"),
    [
        ({"regex": r"[a-c]+\d"}, ["a1", "cab7"], ["", "a", "1", "a12", "a٣"]),
        ({"regex": r"\w+/\s\D"}, ["é/ x", "a/\n/"], ["/ x", "a/ 1"]),
        ({"regex": r"^\w+@x\.org$"}, ["me@x.org"], ["me@xAorg", "@x.org"]),
        ({"regex": "é|/|\n|\""}, ["é", "/", "\n", '"'], ["e", ""]),
        ({"choice": ["yes", "no", "yesterday"]}, ["yes", "no", "yesterday"], ["", "ye", "yesno"]),
        ({"choice": AWKWARD}, AWKWARD, ["q"]),
        ({"json": SCHEMA}, ['{"name":"Al","age":3}', '{"name": "é",\n "age": 30}'], ['{"name":"Al"}', '{"name":"toolong","age":1}', "{}"]),
        ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, ['{"name":"","age":0}'], ['{"name": "", "age": 0}']),
        ({"json": {"enum": ["a", 1, None]}}, ['"a"', "1", "null"], ["a", "2"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '"a"']),
        ({"grammar": LARK}, ["1", "(1+2)*30", "1*2*(3+(4))"], ["", "1+", "(1"]),
        ({"grammar": 'start: ""'}, [""], ["a"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
async def test_what_matches_can_be_written(
    manager: StructuredOutputManager, params: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = await manager.compile(StructuredOutputsParams(**params))
    for text in good:
        assert matches(grammar.start(SamplingParams()), text), text
    for text in bad:
        assert not matches(grammar.start(SamplingParams()), text), text


@pytest.mark.parametrize(
    ("params", "cause"),
    [
        ({"regex": "a(b"}, "unclosed group"),
        ({"regex": "(?=a)a"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": r"[^\s\S]"}, "regex cannot be used: no token"),
        ({"regex": "(" * 1000 + "a" + ")" * 1000}, "regex"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, f"{MAX_GRAMMAR_CHARS + 1} characters"),
        ({"regex": "\ud800"}, "not valid Unicode"),
        ({"json": '{"type":'}, "not valid JSON"),
        ({"json": "[1]"}, "must be a JSON object"),
        ({"json": {"a": {1, 2}}}, "not valid JSON"),
        ({"json": {"minimum": float("nan")}}, "not valid JSON"),
        ({"json": {"type": "strnig"}}, "Invalid type: strnig"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"if": {}, "then": {}}}, "if"),
        ({"json": {"type": "string", "format": "colour"}}, "colour"),
        ({"json": {"type": "string", "format": "colour", "x-guidance": {"lenient": True}}}, "colour"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "minimum"),
        ({"json": {"$ref": "https://example.org/schema"}}, "example.org"),
        ({"json": {"$ref": "#"}}, "json"),
        ({"json": '{"items":' * 5000 + "{}" + "}" * 5000}, "json"),
        ({"grammar": "start: item"}, 'unknown name: "item"'),
        ({"grammar": 'item: "a"'}, "no start rule"),
        ({"grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000}, "nested"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
async def test_what_cannot_be_used_is_refused_with_its_cause(manager: StructuredOutputManager, params: dict[str, Any], cause: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.(json|regex|grammar)") as caught:
        await manager.compile(StructuredOutputsParams(**params))
    assert cause in str(caught.value)
    assert len(str(caught.value)) < 1000


async def test_chains_that_would_overflow_the_stack_are_refused(manager: StructuredOutputManager) -> None:
    """The parser follows rules by recursion: without the limits this ends the process."""
    chain = [f"r{i}: r{i + 1}" for i in range(50_000)]
    with pytest.raises(InvalidRequestError, match=rf"50002 rules, at most {MAX_RULES}"):
        await manager.compile(StructuredOutputsParams(grammar="\n".join(["start: r0", *chain, 'r50000: "a"'])))
    definitions = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(10_000)}
    with pytest.raises(InvalidRequestError, match=r"10001 different .* levels deep"):
        await manager.compile(StructuredOutputsParams(json={"$defs": definitions, "$ref": "#/$defs/d0"}))
    longest = "\n".join(["start: r0", *chain[: MAX_RULES - 2], f'r{MAX_RULES - 2}: "a"'])
    grammar = await manager.compile(StructuredOutputsParams(grammar=longest))
    assert matches(grammar.start(SamplingParams()), "a")


async def test_after_the_end_nothing_but_the_end(manager: StructuredOutputManager) -> None:
    """Whether an end token or the last letter completed it; what is sampled afterwards does not advance it or break it."""
    grammar = await manager.compile(StructuredOutputsParams(regex="ab?"))
    for written in (b"ab", b"a"):
        matcher = grammar.start(SamplingParams())
        matcher.accept(list(written))
        assert matcher.is_complete == (written == b"ab")
        for _ in range(3):
            assert EOS_TOKEN_ID in allowed(matcher.bitmask())
            matcher.accept([EOS_TOKEN_ID])
            assert matcher.is_complete
            assert allowed(matcher.bitmask()) == EOS
        matcher.accept([ord("z"), ord("a")])  # of a step that was in flight
        assert allowed(matcher.bitmask()) == EOS


async def test_min_tokens_leaves_out_the_end_unless_the_grammar_needs_it(manager: StructuredOutputManager) -> None:
    params = SamplingParams(min_tokens=4, max_tokens=9, stop_token_ids=[ord("c")])
    grammar = await manager.compile(StructuredOutputsParams(regex="a[bc]*"))
    matcher = grammar.start(params)
    matcher.accept([ord("a")])
    assert allowed(matcher.bitmask()) == {ord("b")}, "neither the end nor a stop id"
    matcher.accept([ord("b"), ord("b"), ord("b")])
    assert allowed(matcher.bitmask()) == {ord("b"), ord("c"), EOS_TOKEN_ID}, "long enough"

    matcher = (await manager.compile(StructuredOutputsParams(regex="a(c+)?"))).start(params)
    matcher.accept([ord("a")])
    assert allowed(matcher.bitmask()) == {ord("c")}, "only what ends is allowed: rather a stop id than the end of the grammar"

    matcher = (await manager.compile(StructuredOutputsParams(choice=["a"]))).start(params)
    matcher.accept([ord("a")])
    assert allowed(matcher.bitmask()) == EOS, "the grammar wins"


async def test_a_token_that_does_not_match_is_an_error_of_its_request(manager: StructuredOutputManager) -> None:
    grammar = await manager.compile(StructuredOutputsParams(regex="ab"))
    matcher, other = grammar.start(SamplingParams()), grammar.start(SamplingParams())
    matcher.accept([ord("x")])
    for _ in range(2):
        with pytest.raises(GrammarError, match="doesn't satisfy"):
            matcher.bitmask()
    assert matches(other, "ab")


async def test_a_vocabulary_without_the_next_character_is_an_error_not_an_early_end() -> None:
    class OnlyA(FakeTokenizer):
        def token_bytes(self) -> list[bytes]:
            return [token if token in (b"a", b"<eos>") else b"" for token in super().token_bytes()]

    manager = StructuredOutputManager(OnlyA(), vocab_size=261, eos_token_ids=frozenset(EOS))
    grammar = await manager.compile(StructuredOutputsParams(regex="a[b-d]"))
    matcher = grammar.start(SamplingParams())
    assert allowed(matcher.bitmask()) == {ord("a")}
    matcher.accept([ord("a")])
    with pytest.raises(GrammarError, match="no token of the vocabulary"):
        matcher.bitmask()
    with pytest.raises(InvalidRequestError, match="no token of the vocabulary"):
        await manager.compile(StructuredOutputsParams(regex="[b-d]"))
    manager.shutdown()


@pytest.mark.parametrize(
    ("tokenizer", "eos_token_ids", "cause"),
    [
        (None, EOS, "has none"),
        (object(), EOS, "object has neither"),
        (FakeTokenizer(), set(), "end-of-sequence token, and the model has none"),
        (FakeTokenizer(), {9999}, "end-of-sequence token, and the model has none"),
    ],
)
async def test_engines_that_cannot(tokenizer: object, eos_token_ids: set[int], cause: str) -> None:
    manager = StructuredOutputManager(tokenizer, vocab_size=261, eos_token_ids=frozenset(eos_token_ids))
    with pytest.raises(InvalidRequestError, match=cause):
        await manager.compile(StructuredOutputsParams(regex="a"))
    manager.shutdown()


async def test_a_model_with_several_ends_and_more_logits_than_tokens() -> None:
    manager = StructuredOutputManager(FakeTokenizer(), vocab_size=320, eos_token_ids=frozenset({256, 258, 400}))
    grammar = await manager.compile(StructuredOutputsParams(regex="[^x]"))
    matcher = grammar.start(SamplingParams())
    mask = matcher.bitmask()
    assert len(mask) * 8 >= 320
    assert max(allowed(mask)) < 256, "neither a special token nor one that does not exist"
    matcher.accept([ord("a")])
    assert allowed(matcher.bitmask()) == {256, 258}
    manager.shutdown()


async def test_the_vocabulary_is_built_once_and_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    class Counting(FakeTokenizer):
        def token_bytes(self) -> list[bytes]:
            threads.append(threading.get_ident())
            return super().token_bytes()

    manager = StructuredOutputManager(Counting(), vocab_size=261, eos_token_ids=frozenset(EOS))
    assert threads == [], "not before somebody needs it"
    await asyncio.gather(*(manager.compile(StructuredOutputsParams(regex=f"a{{{n}}}")) for n in range(1, 9)))
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
    assert threading.stack_size() != STACK_BYTES, "other threads keep their size"
    manager.shutdown()


async def test_grammars_are_compiled_once_and_not_kept_for_ever(manager: StructuredOutputManager) -> None:
    first = await manager.compile(StructuredOutputsParams(json=SCHEMA))
    assert await manager.compile(StructuredOutputsParams(json=json.dumps(SCHEMA))) is first
    assert await manager.compile(StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)) is not first
    for n in range(1, MAX_CACHED_GRAMMARS):
        await manager.compile(StructuredOutputsParams(regex=f"a{{{n}}}"))
    assert len(manager._compiler._cache) == MAX_CACHED_GRAMMARS
    assert await manager.compile(StructuredOutputsParams(json=SCHEMA)) is not first, "the oldest had to go"


async def test_live_requests(manager: StructuredOutputManager) -> None:
    grammar = await manager.compile(StructuredOutputsParams(choice=["ab", "cd"]))
    manager.add("x", grammar, SamplingParams())
    manager.add("y", grammar, SamplingParams())
    manager.accept("x", [ord("a")])
    manager.accept("not there", [ord("a")])
    assert allowed(manager.bitmask("x")) == {ord("b")}
    assert allowed(manager.bitmask("y")) == {ord("a"), ord("c")}
    manager.remove("x")
    manager.remove("x")
    assert "x" not in manager
    assert len(manager) == 1


async def test_white_space_between_the_tokens_of_json_is_bounded(manager: StructuredOutputManager) -> None:
    """A small model writes newlines for ever where nothing stops it."""
    for given in ({"json_object": True}, {"json": {"type": "object"}}, {"json": '{"type": "array"}'}):
        grammar = await manager.compile(StructuredOutputsParams(**given))
        start, end = "[]" if "array" in str(given) else "{}"
        assert matches(grammar.start(SamplingParams()), f"{start}{' ' * 16}{end}")
        assert not matches(grammar.start(SamplingParams()), f"{start}{' ' * 17}{end}")


@pytest.mark.parametrize(
    ("own", "options", "good", "bad"),
    [
        ({"whitespace_pattern": "[ ]{1,40}"}, {}, "{" + " " * 40 + "}", "{" + " " * 41 + "}"),
        ({"whitespace_flexible": False}, {}, "{}", "{ }"),
        ({"whitespace_pattern": "[ ]+"}, {"disable_any_whitespace": True}, "{}", "{ }"),
    ],
)
async def test_a_schema_may_have_white_space_of_its_own(
    manager: StructuredOutputManager, own: dict[str, Any], options: dict[str, Any], good: str, bad: str
) -> None:
    grammar = await manager.compile(StructuredOutputsParams(json={"type": "object", "x-guidance": own}, **options))
    assert matches(grammar.start(SamplingParams()), good)
    assert not matches(grammar.start(SamplingParams()), bad)


@pytest.mark.parametrize(
    ("schema", "cause"),
    [
        ({"type": "integer", "minimum": 2**53 + 1}, r"9007199254740993 at /minimum"),
        ({"properties": {"default": {"const": -(2**70)}}}, "at /properties/default/const"),
        ({"enum": [1, 904.4924567151611]}, "904.4924567151611 at /enum/1"),
        ({"exclusiveMaximum": 1e300}, r"1e\+300 at /exclusiveMaximum"),
        ({"items": {"multipleOf": 10**400}}, "at /items/multipleOf"),
        ('{"const": 1e400}', "at /const"),
        ({"pattern": "[\x00-\x1f]"}, "control characters"),
        ({"pattern": r"\p{Cc}"}, "control characters"),
        ({"patternProperties": {r"^\P{P}$": {}}}, "control characters"),
        ({"const": "\ud800"}, "not valid JSON"),
    ],
    ids=str,
)  # fmt: skip
async def test_what_the_compiler_of_schemas_would_read_differently_is_refused(
    manager: StructuredOutputManager, schema: Any, cause: str
) -> None:
    with pytest.raises(InvalidRequestError, match=f"structured_outputs.json .*{cause}"):
        await manager.compile(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    "pattern",
    [r'^[^"]$', r"^[^\\]$", r'^[^"\\]$', r"^[^\x00-\x1f]$", r"^[^]a]$", r"^[^-a]$", r"^[]a]$", r"^\[\^$", "^.$", r"^[^\p{Cc}]$", "^a--b$"],
)
async def test_a_pattern_means_inside_a_string_what_it_says(manager: StructuredOutputManager, pattern: str) -> None:
    grammar = await manager.compile(StructuredOutputsParams(json={"type": "string", "pattern": pattern}))
    is_control = r"\p{Cc}" in pattern
    for text in [*"\n\t", *(chr(code) for code in range(32, 127)), "[^", "a--b"]:
        wanted = ord(text[0]) >= 32 if is_control and len(text) == 1 else not is_control and re.search(pattern, text) is not None
        assert matches(grammar.start(SamplingParams()), json.dumps(text)) == wanted, text


async def test_no_name_of_a_property_has_a_second_spelling(manager: StructuredOutputManager) -> None:
    """Else a property that the schema types could come as an additional one."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    grammar = await manager.compile(StructuredOutputsParams(json=schema))
    for text, is_match in (('{"a":1,"b":"x"}', True), ('{"\\u0061":"x"}', False), ('{"a":"x"}', False), ('{"\\n":"x"}', True)):
        assert matches(grammar.start(SamplingParams()), text) == is_match, text


async def test_a_schema_with_control_characters_can_have_them(manager: StructuredOutputManager) -> None:
    for schema in ({"const": "a\x00b"}, {"enum": ["\x1f\x7f"]}, {"type": "string", "pattern": r"^[\x01-\x05]$"}):
        grammar = await manager.compile(StructuredOutputsParams(json=schema))
        text = json.dumps(schema.get("const", schema.get("enum", ["\x03"])[0])).replace("\x7f", "\\u007f")
        assert matches(grammar.start(SamplingParams()), text)


async def test_numbers_in_comments_and_exact_ones_are_taken(manager: StructuredOutputManager) -> None:
    schema = {"default": 2**70, "examples": [1e300], "type": "integer", "minimum": -(2**53), "maximum": 2**53, "multipleOf": 0.5}
    await manager.compile(StructuredOutputsParams(json=schema))
