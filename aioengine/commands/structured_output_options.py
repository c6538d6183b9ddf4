"""`--json-schema`, `--regex`, `--choice`, `--grammar`, `--json-object`: what the output has to match."""

from __future__ import annotations

import argparse
from pathlib import Path

from aioengine.errors import InvalidRequestError
from aioengine.sampling_params import StructuredOutputsParams


def add_structured_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what the output has to match (one of)").add_mutually_exclusive_group()
    add = group.add_argument
    add("--json-schema", metavar="FILE|TEXT", help="JSON that this schema describes; a text begins with {")
    add("--json-object", action="store_true", help="any JSON object")
    add("--regex", metavar="REGEX", help="the whole output matches REGEX")
    add("--choice", action="append", metavar="TEXT", help="one of the texts: repeat it for each")
    add("--grammar", metavar="FILE", help="a grammar in Lark's notation")


def structured_outputs(args: argparse.Namespace) -> StructuredOutputsParams | None:
    """None if nothing is asked for, as of commands without these options. Raises InvalidRequestError."""
    given = {name: getattr(args, name, None) for name in ("json_schema", "json_object", "regex", "choice", "grammar")}
    if not any(value not in (None, False) for value in given.values()):
        return None
    schema, grammar = given["json_schema"], given["grammar"]
    if schema is not None and not schema.lstrip().startswith("{"):
        schema = _read("--json-schema", schema)
    return StructuredOutputsParams(
        json=schema,
        json_object=bool(given["json_object"]),
        regex=given["regex"],
        choice=given["choice"],
        grammar=None if grammar is None else _read("--grammar", grammar),
    )


def _read(option: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:  # a UnicodeDecodeError is a ValueError
        raise InvalidRequestError(f"{option} {path}: {exc.strerror if isinstance(exc, OSError) else 'it is not UTF-8 text'}") from exc
