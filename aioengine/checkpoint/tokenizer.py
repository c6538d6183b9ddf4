"""Text to token ids and back, and chat messages to text.

Reads a `tokenizer.json` through the `tokenizers` package itself: importing transformers for it would add some seconds to every
start. Where a folder of the Hugging Face layout says more than one file holds, transformers has read it once before
(`tokenizer_files`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from aioengine.checkpoint.chat_template import ChatTemplates
from aioengine.checkpoint.json_file import MAX_BYTES
from aioengine.checkpoint.tokenizer_files import is_converted_here, one_line, read_as_it_stands, read_as_transformers
from aioengine.errors import ModelError

# Special tokens that end a text or a turn wherever they occur, by llama.cpp's list (llama-vocab.cpp). Checkpoints of many
# fine-tunes state the base model's end of text only.
_END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>"),
        *("<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    }
)
# In gpt-oss's format <|end|> ends a message of several that make one answer.
_HARMONY = frozenset({"<|return|>", "<|call|>", "<|end|>"})


class Tokenizer:
    """Immutable after construction; safe to use from several threads.

    chat_template: the text of one, or several by name. special_tokens: "bos_token" and the like -> text, as they see them.
    end_token_ids: what the tokenizer itself knows to end a text or a turn.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        special = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_token_ids = frozenset(special)
        self.end_token_ids = _end_token_ids(backend, special, eos_token=self.special_tokens.get("eos_token"))
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._templates = ChatTemplates(chat_template, variables=self.special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return "default" in self._templates

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
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages with "role" and "content" -> the prompt's text. Encode it with add_special_tokens=False.

        tools: JSON schemas of functions. documents: with "title" and "text". variables: what else the template is to see, such
        as enable_thinking. Raises InvalidRequestError if there is no template or if it refuses the messages.
        """
        return self._templates.render(
            messages, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt, variables=variables
        )


def _end_token_ids(backend: tokenizers.Tokenizer, special: Mapping[int, str], *, eos_token: str | None) -> frozenset[int]:
    texts = _END_TEXTS - {"<|end|>"} if set(special.values()) >= _HARMONY else _END_TEXTS
    found = {token_id for token_id, text in special.items() if text in texts}
    eos = None if eos_token is None else backend.token_to_id(eos_token)
    return frozenset(found if eos is None else {*found, eos})


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder. Raises ModelError if there is none or it is broken.

    What this engine converted (out of GGUF) is read as it stands. Of any other folder the result is what transformers'
    AutoTokenizer makes of it: that takes seconds the first time, and is kept in the cache for the next.
    """
    path = folder / "tokenizer.json"
    if path.is_file() and (size := path.stat().st_size) > MAX_BYTES:
        raise ModelError(f"{path} has {size} bytes, more than the {MAX_BYTES} that a tokenizer may have")
    try:
        found = read_as_it_stands(folder) if is_converted_here(folder) else read_as_transformers(folder)
        return Tokenizer(found.backend, chat_template=found.chat_template, special_tokens=found.special_tokens)
    except Exception as error:  # tokenizers raises a bare Exception for a file it cannot read
        raise ModelError(f"cannot read the tokenizer in {folder}: {one_line(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # how a failed assertion of Rust code arrives, past `Exception`
            raise
        raise ModelError(f"cannot read the tokenizer in {folder}: {one_line(error)}") from error
