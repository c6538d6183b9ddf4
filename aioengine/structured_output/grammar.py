"""From `StructuredOutputsParams` to the text of a grammar as llguidance reads it."""

from __future__ import annotations

import json
import re
from typing import Any

from aioengine.errors import InvalidRequestError
from aioengine.sampling_params import StructuredOutputsParams
from aioengine.structured_output.schema_limits import check_numbers, json_escapes, with_sound_patterns

MAX_GRAMMAR_CHARS = 1 << 20
"""Of a schema, regular expression or grammar; of all choices together."""

# llguidance follows rules and references by recursion, and a stack that overflows ends the process. On the stack of
# `compile_thread.STACK_BYTES` it takes ten times as many of either.
MAX_RULES = 2000
MAX_SCHEMA_DEPTH = 8000

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
"""Between the tokens of JSON, unless the schema's "x-guidance" says otherwise. Without a bound a small model writes newlines
until max_tokens: nothing makes it go on."""

_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_]\w*[^:\n\"/]*:", re.MULTILINE)


def kind_of(params: StructuredOutputsParams) -> str:
    """Which field is given, for error messages."""
    return next((name for name in ("json", "regex", "choice", "grammar") if getattr(params, name) is not None), "json_object")


def grammar_text(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own form: equal texts are equal grammars. Whether it makes sense, the compiler finds out.

    Raises InvalidRequestError for what it could not be asked: no JSON, too long, too deep.
    """
    from llguidance import LLMatcher, regex_to_lark

    if params.regex is not None:
        _check_size("regex", params.regex)
        # \d as [0-9], as in a schema's patterns: a random digit of any script is not what is meant. \w and \s stay Unicode's.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(params.regex, use_ascii='d')}/")
    if params.choice is not None:
        # Lark's strings are JSON's, except for control characters, so these are escaped too.
        alternatives = " | ".join(json.dumps(text).replace("\x7f", "\\u007f") for text in params.choice)
        _check_size("choice", alternatives)
        # One terminal: the lexer takes 20,000 texts, where 2,000 alternatives of a rule are too many for the parser.
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}")
    if params.grammar is not None:
        _check_size("grammar", params.grammar)
        _check_rules(params.grammar)
        return LLMatcher.grammar_from_lark(params.grammar)
    return _json_grammar(params)


def _json_grammar(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    schema: Any = {"type": "object"} if params.json is None else _read_schema(params.json)
    # "lenient" would ignore keywords that are not implemented; a schema may ask for it in "x-guidance", hence an override.
    overrides: Any = {"lenient": False}
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    if params.disable_any_whitespace:
        overrides["whitespace_flexible"], overrides["whitespace_pattern"] = False, None
    elif not isinstance(own, dict) or not {"whitespace_pattern", "whitespace_flexible"} & own.keys():
        overrides["whitespace_pattern"] = WHITESPACE
    if not isinstance(own, dict) or "json_allowed_escapes" not in own:
        overrides["json_allowed_escapes"] = json_escapes(schema)
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(with_sound_patterns(schema)), overrides=overrides)
    except (ValueError, RecursionError) as exc:  # half of a surrogate pair, for example
        raise InvalidRequestError(f"structured_outputs.json is not valid JSON: {exc}") from exc


def _read_schema(given: Any) -> Any:
    """A schema as plain JSON values, whether it came as text or as a mapping."""
    try:
        text = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
        _check_size("json", text)
        schema = json.loads(text)
    except (TypeError, ValueError, RecursionError) as exc:
        if isinstance(exc, InvalidRequestError):
            raise
        raise InvalidRequestError(f"structured_outputs.json is not valid JSON: {exc}") from exc
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequestError(f"structured_outputs.json must be a JSON object, which a schema is, got {text[:40]!r}")
    _check_depth(schema)
    check_numbers(schema)
    return schema


def _check_size(name: str, text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"structured_outputs.{name} has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are taken")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequestError(f"structured_outputs.{name} is not valid Unicode: {text[exc.start]!r} at {exc.start}") from exc


def _check_rules(lark: str) -> None:
    num_rules = sum(1 for _ in _RULE.finditer(lark))
    if num_rules > MAX_RULES:
        raise InvalidRequestError(f"structured_outputs.grammar has {num_rules} rules, at most {MAX_RULES} are taken")
    # A grammar may hold schemas (%json).
    num_references = lark.count('"$ref"')
    if num_references > MAX_RULES:
        raise InvalidRequestError(f'structured_outputs.grammar has {num_references} "$ref", at most {MAX_RULES} are taken')


def _check_depth(schema: Any) -> None:
    """Refuse schemas whose references, followed one after the other, could nest too deeply."""
    references: set[str] = set()
    depth, level = 0, [schema]
    while level:
        depth += 1
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                if isinstance(reference := value.get("$ref"), str):
                    references.add(reference)
                below += value.values()
            elif isinstance(value, list):
                below += value
        level = below
    if references and len(references) * depth > MAX_SCHEMA_DEPTH:
        raise InvalidRequestError(
            f'structured_outputs.json has {len(references)} different "$ref" in a schema {depth} levels deep, '
            f"together at most {MAX_SCHEMA_DEPTH} levels are taken"
        )
