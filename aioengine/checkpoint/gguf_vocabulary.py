# ruff: noqa: RUF001  (tokens of models look like this)
"""The vocabulary of a GGUF file: its tokens, what kind each is, which end a text, and what is put around one.

As llama.cpp reads it (`llama_vocab::impl::load`), which also knows some tokens by their text: most files do not name every token that
ends a turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

from aioengine.checkpoint.gguf import GGUFFile
from aioengine.checkpoint.gguf_header import ArrayInfo
from aioengine.checkpoint.gguf_split import SPLITTINGS
from aioengine.errors import ModelError
from aioengine.printable import get_logger

logger = get_logger(__name__)

_PREFIX = "tokenizer.ggml."
# What to do with a `tokenizer.ggml.model` that cannot be converted so that its ids are llama.cpp's.
_SENTENCEPIECE, _BYTE_LEVEL = "llama", "gpt2"
_OTHER_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "bert": "WordPiece, of embedding models",
        "t5": "unigram",
        "rwkv": "RWKV's trie",
        "plamo2": "PLaMo 2's own",
        "gemma4": "Gemma 4's own",
        "hybriddna": "a DNA alphabet",
        "whitespace": "words",
        "test": "a test of llama.cpp",
        "none": "no vocabulary at all",
        "no_vocab": "no vocabulary at all",
    }
)
# Byte-level names of llama.cpp whose words are not byte-level.
_OTHER_SPLITS = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace"})
_DEFAULT_IDS: Mapping[str, int] = MappingProxyType({"bos": 1, "eos": 2, "unknown": 0})  # of SentencePiece vocabularies

# Texts that end a text or a turn, whatever the keys say.
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>"),
        *("</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    }
)
# Parts of a text to fill in: the key, and the texts by which the token is known if the key is not there.
_FILL_IN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "fim_pre": frozenset(
            {"<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>"}
        ),
        "fim_suf": frozenset(
            {"<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>"}
        ),
        "fim_mid": frozenset(
            {"<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>", "<|middle|>"}
        ),
        "fim_pad": frozenset({"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"}),
        "fim_rep": frozenset({"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"}),
        "fim_sep": frozenset({"<|file_sep|>"}),
    }
)
_OLD_KEYS: Mapping[str, str] = MappingProxyType({"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"})
_FILL_IN_ENDS = ("fim_pad", "fim_rep", "fim_sep")
_END_KEYS = ("eos", "eot", "eom")
_SHOWN = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})  # of gpt-oss: part of what it answers


class TokenType(IntEnum):
    """The numbers of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    model: str  # "llama" (SentencePiece) or "gpt2" (byte-level)
    pre: str  # a key of SPLITTINGS; of no meaning for SentencePiece
    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    scores: tuple[float, ...]  # of SentencePiece
    merges: tuple[str, ...]  # of byte-level vocabularies, best first
    special: Mapping[str, int]  # "bos", "eos", "unknown", "padding", ...: only those that are there
    ends: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool

    @property
    def is_sentencepiece(self) -> bool:
        return self.model == _SENTENCEPIECE


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Raises ModelError naming the key that is missing, wrong, or of a kind that cannot be converted."""
    metadata, path = file.header.metadata, file.header.path
    model, pre = _read_kind(file)
    tokens = _read_tokens(file)
    types = _read_types(file, len(tokens))
    sentencepiece = model == _SENTENCEPIECE
    if sentencepiece:
        tokens = _with_space_marks(tokens, types)
    if not sentencepiece and _PREFIX + "merges" not in metadata:
        raise ModelError(
            f"{path} has no {_PREFIX}merges: a byte-level vocabulary does not say without them how its tokens are put together"
        )
    merges = tuple(file.strings(_PREFIX + "merges")) if not sentencepiece else ()
    special = _read_special(file, len(tokens), defaults=_DEFAULT_IDS if sentencepiece else {})
    ends, types = _find_ends(tokens, types, special)
    ends |= _listed_ends(file, len(tokens))
    add_bos = _flag(file, "add_bos_token", default=sentencepiece or SPLITTINGS[pre].add_bos)
    add_eos = _flag(file, "add_eos_token", default=False)
    return Vocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=_read_scores(file, len(tokens)) if sentencepiece else (),
        merges=merges,
        special=MappingProxyType(special),
        ends=ends,
        add_bos=_possible(file, "bos", special, wanted=add_bos),
        add_eos=_possible(file, "eos", special, wanted=add_eos),
        add_space_prefix=_flag(file, "add_space_prefix", default=True) and sentencepiece,
    )


def _read_kind(file: GGUFFile) -> tuple[str, str]:
    metadata, path = file.header.metadata, file.header.path
    model = metadata.get(_PREFIX + "model")
    if model in _OTHER_MODELS:
        kinds = f"supported: {_SENTENCEPIECE} (SentencePiece), {_BYTE_LEVEL} (byte-level)"
        raise ModelError(f"{path}: {_PREFIX}model {model!r} ({_OTHER_MODELS[str(model)]}) is not supported; {kinds}")
    if model not in (_SENTENCEPIECE, _BYTE_LEVEL):
        raise ModelError(f"{path}: {_PREFIX}model must be {_SENTENCEPIECE!r} or {_BYTE_LEVEL!r}, got {model!r:.200}")
    pre = metadata.get(_PREFIX + "pre", "")
    if model == _SENTENCEPIECE:
        return str(model), "default"
    if pre == "":
        logger.warning(
            "%s has no %spre, which says how texts are cut into words; taking llama.cpp's default. If answers are poor, convert it anew",
            path,
            _PREFIX,
        )
        pre = "default"
    if not isinstance(pre, str) or pre not in SPLITTINGS:
        known = "words are not cut byte by byte" if pre in _OTHER_SPLITS else f"known: {', '.join(sorted(SPLITTINGS))}"
        raise ModelError(f"{path}: {_PREFIX}pre {pre!r:.200} is not supported; {known}")
    return str(model), pre


def _read_tokens(file: GGUFFile) -> tuple[str, ...]:
    path = file.header.path
    found = file.header.metadata.get(_PREFIX + "tokens")
    if not isinstance(found, ArrayInfo) or not found.of_strings or not found.num_items:
        raise ModelError(f"{path}: {_PREFIX}tokens must be an array of strings, got {found!r:.200}")
    tokens = tuple(text or f"[EMPTY_{i}]" for i, text in enumerate(file.strings(_PREFIX + "tokens")))
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(text for text in tokens if text in seen or seen.add(text))  # type: ignore[func-returns-value]
        raise ModelError(f"{path}: the token {twice!r:.200} is in {_PREFIX}tokens twice")
    return tokens


def _with_space_marks(tokens: tuple[str, ...], types: tuple[TokenType, ...]) -> tuple[str, ...]:
    """Runs of spaces that are tokens as SentencePiece and transformers have them; llama.cpp's converter wrote spaces for the marks."""
    known = set(tokens)
    marked = [
        "▁" * len(text) if kind == TokenType.USER_DEFINED and not text.strip(" ") and "▁" * len(text) not in known else text
        for text, kind in zip(tokens, types, strict=True)
    ]
    return tuple(marked)


def _read_types(file: GGUFFile, count: int) -> tuple[TokenType, ...]:
    key = _PREFIX + "token_type"
    if key not in file.header.metadata:
        return (TokenType.NORMAL,) * count
    numbers = _numbers(file, key, count)
    known: dict[float, TokenType] = {int(kind): kind for kind in TokenType}
    return tuple(known.get(number, TokenType.UNDEFINED) for number in numbers)


def _read_scores(file: GGUFFile, count: int) -> tuple[float, ...]:
    """Raises ModelError if they do not say which merge comes first."""
    path, key = file.header.path, _PREFIX + "scores"
    if key not in file.header.metadata:
        raise ModelError(f"{path} has no {key}: a SentencePiece vocabulary does not say without them which tokens are put together first")
    scores = tuple(float(score) for score in _numbers(file, key, count))
    if any(score != score for score in scores):
        raise ModelError(f"{path}: {key} has a score that is not a number")
    return scores


def _numbers(file: GGUFFile, key: str, count: int) -> Sequence[float]:
    numbers = file.numbers(key)
    if len(numbers) < count:
        raise ModelError(f"{file.header.path}: {key} has {len(numbers)} items, {_PREFIX}tokens has {count}")
    return numbers[:count]


def _read_special(file: GGUFFile, count: int, *, defaults: Mapping[str, int]) -> dict[str, int]:
    """Ids by name. One that is not in the vocabulary is left out, with a warning."""
    found = {name: token for name, token in defaults.items() if token < count}
    names = {
        **{name: name for name in ("bos", "eos", "eot", "eom", "unknown", "padding", "mask", "seperator", *_FILL_IN)},
        **{old: name for name, old in _OLD_KEYS.items()},
    }
    for key_name, name in names.items():
        key = f"{_PREFIX}{key_name}_token_id"
        value = file.header.metadata.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{file.header.path}: {key} must be a token id, got {value!r:.200}")
        if 0 <= value < count:
            found[name] = value
        else:
            logger.warning("%s: %s is %d, which is none of the %d tokens; left out", file.header.path, key, value, count)
    return found


def _listed_ends(file: GGUFFile, count: int) -> frozenset[int]:
    """Ids of `eos_token_ids`, which Ollama writes."""
    key = _PREFIX + "eos_token_ids"
    if key not in file.header.metadata:
        return frozenset()
    listed = file.numbers(key)
    numbers = {number for number in listed if isinstance(number, int)}
    if len(numbers) != len(set(listed)):
        raise ModelError(f"{file.header.path}: {key} must be token ids, got {listed!r:.200}")
    wrong = sorted(number for number in numbers if not 0 <= number < count)
    if wrong:
        logger.warning("%s: %s has %s, which are none of the %d tokens; left out", file.header.path, key, str(wrong)[:200], count)
    return frozenset(numbers.difference(wrong))


def _flag(file: GGUFFile, name: str, *, default: bool) -> bool:
    value = file.header.metadata.get(_PREFIX + name, default)
    if not isinstance(value, bool):
        raise ModelError(f"{file.header.path}: {_PREFIX}{name} must be true or false, got {value!r:.200}")
    return value


def _possible(file: GGUFFile, name: str, special: Mapping[str, int], *, wanted: bool) -> bool:
    if wanted and name not in special:
        logger.warning("%s asks for a %s around texts and does not say which token that is; none is added", file.header.path, name.upper())
        return False
    return wanted


def _find_ends(
    tokens: tuple[str, ...], types: tuple[TokenType, ...], special: dict[str, int]
) -> tuple[frozenset[int], tuple[TokenType, ...]]:
    """The ids that end a text or a turn, and the types, corrected for tokens that are known by their text. Completes `special`."""
    kinds = list(types)
    for name, texts in _FILL_IN.items():
        if name not in special and (known := [i for i, text in enumerate(tokens) if text in texts]):
            special[name] = known[0]
            kinds[known[0]] = TokenType.CONTROL
    ends = {i for i, text in enumerate(tokens) if text in _ENDS}
    for token in sorted(ends):
        kinds[token] = TokenType.CONTROL
    for token, text in enumerate(tokens):
        if text in _SHOWN:
            kinds[token] = TokenType.USER_DEFINED
    ends |= {special[name] for name in (*_END_KEYS, *_FILL_IN_ENDS) if name in special}
    by_text = {tokens[token]: token for token in sorted(ends)}
    calls = bool({"<|call|>", "<|calls|>"} & by_text.keys())
    if "<|end|>" in by_text and calls and ({"<|return|>", "<|flush|>"} & by_text.keys()):  # ends a part of an answer there
        ends.discard(by_text["<|end|>"])
        kinds[by_text["<|end|>"]] = TokenType.USER_DEFINED
    if "</s>" in by_text and "<start_of_turn>" in tokens:  # Gemma's vocabulary has HTML's tags, this one strikes words out
        ends.discard(by_text["</s>"])
        kinds[by_text["</s>"]] = types[by_text["</s>"]]
    elif "</s>" in by_text and {"<|tool_response>", "<|plamo:eos|>"} & by_text.keys():
        ends.discard(by_text["</s>"])
        kinds[by_text["</s>"]] = TokenType.NORMAL
    return frozenset(ends), tuple(kinds)
