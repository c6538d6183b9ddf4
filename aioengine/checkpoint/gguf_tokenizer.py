"""A `tokenizer.json` from the vocabulary of a GGUF file, with the ids of llama.cpp."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aioengine.checkpoint.gguf_split import SPLITTINGS
from aioengine.checkpoint.gguf_vocabulary import TokenType, Vocabulary
from aioengine.errors import ModelError

_SPACE = "▁"
# Of all splits of all tokens, in letters: some three times what a vocabulary of 256,000 needs.
_MAX_SPLIT_LETTERS = 1 << 26
# Tokens whose white space to the right belongs to them; GGUF does not say so, llama.cpp goes by the model's name.
_PHI3_NAMES = ("phi-3", "phi3")
_PHI3_PLAIN = frozenset({"<unk>", "<s>", "<|endoftext|>"})
_MASKS_WITH_SPACE = frozenset({"jina-v2-de", "jina-v2-es", "jina-v2-code"})


def tokenizer_json(vocabulary: Vocabulary, *, path: Path, model_name: str = "") -> dict[str, Any]:
    """The content of tokenizer.json. model_name: `general.name`. Raises ModelError, naming `path`, for merges that cannot be."""
    if vocabulary.is_sentencepiece:
        normalizer, splitting, model, decoder = _sentencepiece(vocabulary, path)
    else:
        normalizer, splitting, model, decoder = _byte_level(vocabulary, path)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary, model_name),
        "normalizer": normalizer,
        "pre_tokenizer": splitting,
        "post_processor": _post_processor(vocabulary),
        "decoder": decoder,
        "model": model,
    }


def _added_tokens(vocabulary: Vocabulary, model_name: str) -> list[dict[str, Any]]:
    """Those that are found in a text before anything else happens to it."""
    strips_right = any(name in model_name.lower() for name in _PHI3_NAMES)
    found = []
    for token, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
            found.append(
                {
                    "id": token,
                    "content": text,
                    "single_word": False,
                    "lstrip": text == "<mask>" and vocabulary.pre in _MASKS_WITH_SPACE,
                    "rstrip": strips_right and text not in _PHI3_PLAIN,
                    "normalized": False,
                    "special": kind != TokenType.USER_DEFINED,
                }
            )
    return found


def _post_processor(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """BOS before and EOS after a text, where the file asks for them."""
    names = [name for name, wanted in (("bos", vocabulary.add_bos), ("eos", vocabulary.add_eos)) if wanted]
    if not names:
        return None
    texts = {name: vocabulary.tokens[vocabulary.special[name]] for name in names}

    def pieces(sequences: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for type_id, sequence in enumerate(sequences):
            around = {name: [{"SpecialToken": {"id": text, "type_id": type_id}}] for name, text in texts.items()}
            found += [*around.get("bos", []), {"Sequence": {"id": sequence, "type_id": type_id}}, *around.get("eos", [])]
        return found

    special = {text: {"id": text, "ids": [vocabulary.special[name]], "tokens": [text]} for name, text in texts.items()}
    return {"type": "TemplateProcessing", "single": pieces("A"), "pair": pieces("AB"), "special_tokens": special}


def _bpe(vocabulary: Vocabulary, merges: Iterable[tuple[str, str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": {text: token for token, text in enumerate(vocabulary.tokens)},
        "merges": [list(merge) for merge in merges],
    }


def _byte_level(vocabulary: Vocabulary, path: Path) -> tuple[Any, Any, Any, Any]:
    splitting = SPLITTINGS[vocabulary.pre]
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in splitting.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = _bpe(vocabulary, _checked_merges(vocabulary, path), ignore_merges=splitting.ignore_merges)
    return None, {"type": "Sequence", "pretokenizers": [*splits, byte_level]}, model, byte_level


def _checked_merges(vocabulary: Vocabulary, path: Path) -> Iterable[tuple[str, str]]:
    """The first of each pair counts. Raises ModelError for a merge of, or into, what is no token."""
    known, seen = set(vocabulary.tokens), dict[tuple[str, str], None]()
    for merge in vocabulary.merges:
        place = merge.find(" ", 1)
        if place < 0:  # llama.cpp passes over it as well
            continue
        pair = merge[:place], merge[place + 1 :]
        missing = [part for part in (*pair, pair[0] + pair[1]) if part not in known]
        if missing:
            raise ModelError(f"{path}: tokenizer.ggml.merges: {merge!r:.200} needs {missing[0]!r:.200}, which is none of the tokens")
        seen.setdefault(pair)
    return seen


def _sentencepiece(vocabulary: Vocabulary, path: Path) -> tuple[Any, Any, Any, Any]:
    """As transformers converts SentencePiece's own files: no splitting; spaces become a letter, with one more before every text."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if vocabulary.add_space_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if vocabulary.add_space_prefix else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoder = {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]}
    unknown = vocabulary.special.get("unknown")
    model = _bpe(
        vocabulary,
        _merges_of_scores(vocabulary, path),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    return {"type": "Sequence", "normalizers": [*prepend, replace]}, None, model, decoder


def _merges_of_scores(vocabulary: Vocabulary, path: Path) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose token has the highest score first; pairs of one token, as transformers orders them.

    Raises ModelError where the order is lost, and for a token whose letters are not all tokens.
    """
    tokens = vocabulary.tokens
    if sum(len(text) ** 2 for text in tokens) > _MAX_SPLIT_LETTERS:
        longest = max(map(len, tokens))
        raise ModelError(f"{path}: tokenizer.ggml.tokens has too long tokens for a SentencePiece vocabulary, of up to {longest} letters")
    ids = {text: token for token, text in enumerate(tokens)}
    found: list[tuple[float, int, int, int, str, str]] = []
    scores: Counter[float] = Counter()
    for token, text in enumerate(tokens):
        pairs = [(text[:i], text[i:]) for i in range(1, len(text))]
        pairs = [(left, right) for left, right in pairs if (left in ids or len(left) == 1) and (right in ids or len(right) == 1)]
        # Runs of spaces come before all else, as in SentencePiece, where tokens of the user's own have the best score.
        score = math.inf if vocabulary.types[token] == TokenType.USER_DEFINED and not text.strip(_SPACE) else vocabulary.scores[token]
        if pairs and vocabulary.types[token] == TokenType.NORMAL:
            scores[vocabulary.scores[token]] += 1
        for left, right in pairs:
            if left in ids and right in ids:
                found.append((-score, -len(left), -len(right), token, left, right))
            elif vocabulary.types[token] == TokenType.NORMAL:
                letter = left if left not in ids else right
                raise ModelError(f"{path}: tokenizer.ggml.tokens: {text!r:.200} can be put together from {letter!r}, which is no token")
    if scores:
        score, count = scores.most_common(1)[0]
        if 2 * count > scores.total() > 2:
            raise ModelError(
                f"{path}: tokenizer.ggml.scores: {count} of {scores.total()} tokens have the score {score:g}: the order in which they are "
                "put together is lost; convert the model again, from its tokenizer.model"
            )
    return [(left, right) for *_, left, right in sorted(found)]
