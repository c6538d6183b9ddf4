"""Text to token ids and back, and chat messages to text.

Reads the `tokenizer.json` that transformers writes, through the `tokenizers` package itself: importing transformers for
it would add most of a second to every start. Chat templates are Jinja, rendered in the environment that transformers
documents for them (https://huggingface.co/docs/transformers/chat_templating).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from aioengine.errors import InvalidRequestError, ModelError
from aioengine.models.json_file import MAX_BYTES, read_json, read_text

if TYPE_CHECKING:
    import jinja2

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Immutable after construction; safe to use from several threads.

    special_tokens: "bos_token" and the like -> text, as chat templates see them.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, chat_template: str | None = None, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.special_token_ids = frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._chat_template = chat_template
        self._compiled: jinja2.Template | None = None  # on the first use: Jinja is not needed for plain prompts

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. add_special_tokens: what the model puts around a text, such as BOS; False for a rendered chat."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no whole character come out as U+FFFD."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages with "role" and "content" -> the prompt's text. Encode it with add_special_tokens=False.

        tools: JSON schemas of functions. variables: what else the template is to see, such as enable_thinking.
        Raises InvalidRequestError if there is no template or if it refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidRequestError("the model has no chat template; pass the prompt as text or token ids")

        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self._chat_template)
            return self._compiled.render(
                **{
                    **self.special_tokens,
                    **(variables or {}),
                    "messages": [dict(message) for message in messages],
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # the template is other people's code: it may divide by zero, or call itself for ever
            raise InvalidRequestError(f"the chat template refuses these messages: {error}") from error


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder. Raises ModelError if there is none or it is broken.

    A folder without tokenizer.json (sentencepiece only) is converted through transformers each time, which takes seconds.
    """
    path = folder / "tokenizer.json"
    if path.is_file() and (size := path.stat().st_size) > MAX_BYTES:
        raise ModelError(f"{path} has {size} bytes, more than the {MAX_BYTES} that a tokenizer may have")
    try:
        # tokenizers raises a bare Exception for a file it cannot read.
        backend = tokenizers.Tokenizer.from_file(str(path)) if path.is_file() else _convert(folder)
    except Exception as error:
        raise ModelError(f"cannot read the tokenizer in {folder}: {error}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # how a failed assertion of Rust code arrives, past `Exception`
            raise
        raise ModelError(f"cannot read the tokenizer in {folder}: {error}") from error
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    return Tokenizer(backend, chat_template=_read_template(folder, config), special_tokens=_special_tokens(config))


def _convert(folder: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    backend = getattr(AutoTokenizer.from_pretrained(folder, local_files_only=True), "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError("it has no tokenizer.json and cannot be converted to one")
    return backend


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """A token is stored as text or as an object with its text in "content"."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the key of tokenizer_config.json: a text, or a list of named ones of which "default" counts."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry.get("template") for entry in template if isinstance(entry, Mapping) and entry.get("name") == "default"]
        template = named[-1] if named else None
    return template if isinstance(template, str) else None


def _environment() -> jinja2.Environment:
    """Templates are other people's code, hence the sandbox. The extras are those that transformers promises to templates."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks the assistant's words for training; here its body is just rendered."""

        tags = {"generation"}  # noqa: RUF012  (Jinja's own attribute)

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes HTML characters.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment
