"""Whoever ends by an end token has written what the grammar accepts: random grammars, several kinds of vocabularies."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken

from aioengine.checkpoint.tokenizer import Tokenizer, load_tokenizer
from aioengine.models.info import resolve_model
from aioengine.sampling_params import SamplingParams, StructuredOutputsParams
from aioengine.structured_output.manager import StructuredOutputManager
from aioengine.structured_output.matcher import CompiledGrammar
from aioengine.structured_output.vocabulary import Vocabulary, build_vocabulary
from tests.structured_output.vocabularies import ALL, EOS_TOKEN_ID, SPECIAL, text_of, walk

AWKWARD = [*SPECIAL, "<tool>", "hello world", "▁", "a▁ b", "e\u0301", "é", "\n", '"', "\\", " ", "<0x41>", "😀", "\x7f", "<[2]>", "ÿ"]


def lark_string(text: str) -> str:
    return json.dumps(text).replace("\x7f", "\\u007f")


def compile_all(tokenizer: Tokenizer, many: list[dict[str, Any]], *, vocab_size: int | None = None) -> list[CompiledGrammar]:
    async def compile_them() -> list[CompiledGrammar]:
        manager = StructuredOutputManager(tokenizer, vocab_size=vocab_size or tokenizer.vocab_size, eos_token_ids=frozenset({EOS_TOKEN_ID}))
        made = await asyncio.gather(*(manager.compile(StructuredOutputsParams(**one)) for one in many))
        manager.shutdown()
        return made

    return asyncio.run(compile_them())


@pytest.fixture(params=ALL)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return ALL[request.param]()


@pytest.mark.parametrize("text", [f"{before}{name}{after}" for name in AWKWARD for before, after in (("", ""), ("x", "y"), (" ", "<"))])
def test_a_forced_text_is_written_as_it_is(tokenizer: Tokenizer, text: str) -> None:
    """Whatever it spells: the name of a special token, a piece of another vocabulary, what a normalizer would change."""
    schema = {"type": "object", "properties": {text: {"const": text}}, "required": [text], "additionalProperties": False}
    regex, choice, lark, json_grammar = compile_all(
        tokenizer,
        [
            {"regex": re.escape(text).replace("<", r"\x3c").replace("\\ ", " ")},
            {"choice": [text]},
            {"grammar": f"start: {lark_string(text)}"},
            {"json": schema, "disable_any_whitespace": True},
        ],
    )
    rng = random.Random(text)
    for grammar in (regex, choice, lark):
        token_ids, written = walk(grammar, tokenizer, rng)
        assert written == text
        assert not tokenizer.special_token_ids.intersection(token_ids)
    _, written = walk(json_grammar, tokenizer, rng)
    assert written is not None
    assert json.loads(written) == {text: text}


def test_a_long_forced_text_is_cut_into_tokens_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time would take time in proportion to the text, for each of its tokens, in the event loop."""
    rng = random.Random(1)
    plain = "".join(rng.choice(["yes ", "abc", "é", "no\n"]) for _ in range(1_500))
    texts = [plain, plain[:1_000] + "<|im_end|>" + plain, plain + "e\u0301"]
    calls: list[int] = []
    tokens_of = Vocabulary.tokens_of

    def counted(self: Vocabulary, text: bytes) -> list[int] | None:
        calls.append(len(text))
        return tokens_of(self, text)

    monkeypatch.setattr(Vocabulary, "tokens_of", counted)
    grammars = compile_all(tokenizer, [{"choice": [text]} for text in texts] + [{"regex": f"(a|b)({texts[1].replace('|', '.')})c"}])
    for grammar, text in zip(grammars[:3], texts, strict=True):
        calls.clear()
        _, written = walk(grammar, tokenizer, rng, max_tokens=10_000)
        assert written == text
        assert len([length for length in calls if length > 512]) <= 2
    _, written = walk(grammars[3], tokenizer, rng, max_tokens=10_000)
    assert written is not None
    assert re.fullmatch(f"(a|b)({texts[1].replace('|', '.')})c", written)


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice([*AWKWARD, *"abcxyz ,:{}[]"]) for _ in range(rng.randint(1, 4)))


def random_regex(rng: random.Random, depth: int = 3) -> str:
    kind = rng.randrange(6 if depth else 2)
    if kind == 0:
        return re.escape(random_text(rng)).replace("\\ ", " ")
    if kind == 1:
        return rng.choice(["[a-c]", "[^<]", r"\d", "[é😀<]", "[|>im_]"])
    below = [random_regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    if kind == 2:
        return f"(?:{'|'.join(below)})"
    return f"(?:{''.join(below)}){rng.choice(['', '?', '*', '{1,3}', '{2}'])}"


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kind = rng.randrange(8 if depth else 6)
    if kind == 0:
        return {"enum": [rng.choice([random_text(rng), rng.randint(-99, 99), None, True, round(rng.uniform(-9, 9), 3)]) for _ in range(3)]}
    if kind == 1:
        return {"type": "string", "maxLength": 4}
    if kind == 2:
        return {"type": "string", "pattern": rng.choice([r'^[^"]{0,4}$', r"^[^\\]{0,4}$", r"^[^<>\x00-\x1f]{0,4}$", "^[a-z]+$"])}
    if kind == 3:
        return {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 50)}
    if kind == 4:
        return {"const": random_text(rng)}
    if kind == 5:
        return {"type": ["boolean", "null"]}
    if kind == 6:
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": rng.randint(0, 2), "maxItems": 3}
    names = [random_text(rng) for _ in range(rng.randint(1, 3))]
    properties = {name: random_schema(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": names[:1], "additionalProperties": False}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """The schemas of `random_schema`, read once more."""
    if "enum" in schema or "const" in schema:
        return any(type(value) is type(one) and value == one for one in schema.get("enum", [schema.get("const")]))
    kind = schema["type"]
    if kind == "string":
        fits = len(value) <= schema.get("maxLength", 1 << 20) if isinstance(value, str) else False
        return fits and re.search(schema.get("pattern", ""), value) is not None
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "array":
        fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(is_valid(item, schema["items"]) for item in value)
    if kind == "object":
        fits = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(schema["properties"])
        return fits and all(is_valid(item, schema["properties"][name]) for name, item in value.items())
    return value is None or isinstance(value, bool)


def random_grammar(rng: random.Random) -> tuple[dict[str, Any], Callable[[str], bool]]:
    """A grammar, and who says whether a text matches it."""
    kind = rng.randrange(4)
    if kind == 0:
        regex = random_regex(rng)
        return {"regex": regex}, lambda text: re.fullmatch(regex, text) is not None
    if kind == 1:
        choice = [random_text(rng) for _ in range(rng.randint(1, 5))]
        return {"choice": choice}, choice.__contains__
    if kind == 2:
        schema = random_schema(rng)
        return {"json": schema}, lambda text: is_valid(json.loads(text), schema)
    words = [random_text(rng) for _ in range(3)]
    literals = [lark_string(word) for word in words]
    lark = f'start: "(" start ")" | item\nitem: {literals[0]} | {literals[1]} "," item | {literals[2]}'

    def in_brackets(text: str) -> bool:
        depth = 0
        while text.startswith("(") and text.endswith(")") and depth < 300:
            text, depth = text[1:-1], depth + 1
        pattern = rf"(?:{re.escape(words[1])},)*(?:{re.escape(words[0])}|{re.escape(words[2])})"
        return re.fullmatch(pattern, text) is not None

    return {"grammar": lark}, in_brackets


def test_a_token_that_the_model_has_no_logits_for_is_never_allowed(tokenizer: Tokenizer) -> None:
    """The tokenizer's last token is "hello world", which it would write that text in."""
    vocab_size = tokenizer.encode("hello world", add_special_tokens=False)[-1]
    assert vocab_size == tokenizer.vocab_size - 1
    for given in ({"choice": ["hello world"]}, {"regex": "(hello )?(hello world)+"}):
        (grammar,) = compile_all(tokenizer, [given], vocab_size=vocab_size)
        token_ids, text = walk(grammar, tokenizer, random.Random(1))
        assert max(token_ids) < vocab_size
        assert text is not None
        assert re.fullmatch("(hello )?(hello world)+", text)


def check_random_grammars(tokenizer: Tokenizer, *, num_grammars: int, seed: int) -> int:
    rng = random.Random(seed)
    cases = [random_grammar(rng) for _ in range(num_grammars)]
    num_ended = 0
    for grammar, (given, is_match) in zip(compile_all(tokenizer, [given for given, _ in cases]), cases, strict=True):
        for _ in range(3):
            params = SamplingParams(max_tokens=400, min_tokens=rng.choice([0, 0, 5]))
            _, text = walk(grammar, tokenizer, rng, params=params)
            if text is not None:
                num_ended += 1
                assert is_match(text), (given, text)
    return num_ended


def test_whoever_ends_by_an_end_token_matches(tokenizer: Tokenizer) -> None:
    assert check_random_grammars(tokenizer, num_grammars=60, seed=1) > 100


@pytest.mark.slow
def test_whoever_ends_by_an_end_token_matches_in_many_grammars(tokenizer: Tokenizer) -> None:
    for seed in range(2, 30):
        assert check_random_grammars(tokenizer, num_grammars=100, seed=seed) > 100


def check_whole_vocabulary(tokenizer: Tokenizer) -> None:
    vocabulary = build_vocabulary(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=frozenset({EOS_TOKEN_ID}))
    for token_id in range(tokenizer.vocab_size):
        if vocabulary.trie.is_special_token(token_id) or token_id in vocabulary.misread:
            continue
        read = vocabulary.trie.decode_bytes([token_id])
        assert read.decode(errors="replace") == text_of(tokenizer, [token_id]), (token_id, read)


def test_the_grammar_sees_of_every_token_what_the_user_sees(tokenizer: Tokenizer) -> None:
    check_whole_vocabulary(tokenizer)


@pytest.mark.model
def test_the_grammar_sees_of_every_token_of_the_built_in_model_what_the_user_sees() -> None:
    check_whole_vocabulary(load_tokenizer(resolve_model("smollm2", progress=False).folder))


def test_an_added_token_that_is_read_differently_is_never_allowed() -> None:
    """A SentencePiece vocabulary writes a space before an added token that its normalizer changes; the grammar knows of none."""
    tokenizer = ALL["sentencepiece"]()
    tokenizer.backend.add_tokens([AddedToken("\n\n", normalized=True)])
    tokenizer = Tokenizer(tokenizer.backend)
    vocabulary = build_vocabulary(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=frozenset({EOS_TOKEN_ID}))
    check_whole_vocabulary(tokenizer)
    (grammar,) = compile_all(tokenizer, [{"regex": "(\n\n)+"}])
    for seed in range(20):
        token_ids, text = walk(grammar, tokenizer, random.Random(seed), max_tokens=20)
        assert not vocabulary.misread.intersection(token_ids)
        assert text is None or re.fullmatch("(\n\n)+", text)
