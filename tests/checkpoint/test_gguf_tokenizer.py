"""Tokenizers out of GGUF: ids, stop tokens and refusals, against plain implementations of what llama.cpp does.

`test_gguf_oracle.py` compares with llama.cpp's own vocabulary files.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from aioengine.checkpoint.gguf import GGUFFile
from aioengine.checkpoint.gguf_split import SPLITTINGS
from aioengine.checkpoint.gguf_tokenizer import tokenizer_json
from aioengine.checkpoint.gguf_vocabulary import TokenType, Vocabulary, read_vocabulary
from aioengine.checkpoint.tokenizer import load_tokenizer
from aioengine.errors import ModelError
from aioengine.models.info import read_model_info, resolve_model
from tests.checkpoint.test_gguf import write_gguf
from tests.checkpoint.test_gguf_keys import put
from tests.models.support import cases, random_model

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
LETTERS = {letter: letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet())}


def write_vocabulary(path: Path, vocabulary: Sequence[str], *, model: str | None = "gpt2", **keys: Any) -> Path:
    """A file with a vocabulary and nothing else. keys: under "tokenizer.ggml."; None leaves one out."""
    found: dict[str, Any] = {"model": model, "pre": "gpt-2", "tokens": list(vocabulary), "token_type": [NORMAL] * len(vocabulary)}
    found |= {"merges": [" "]} if model == "gpt2" else {"scores": [-float(i) for i in range(len(vocabulary))]}
    writer = gguf.GGUFWriter(path, "llama")
    put(writer, {f"tokenizer.ggml.{key}": value for key, value in (found | keys).items() if value is not None})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def read(path: Path, tokens: Sequence[str], **keys: Any) -> tuple[Vocabulary, tokenizers.Tokenizer]:
    vocabulary = read_vocabulary(GGUFFile(write_vocabulary(path / "v.gguf", tokens, **keys)))
    return vocabulary, tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(vocabulary, path=path)))


def types_of(tokens: Sequence[str], special: Mapping[str, int]) -> list[int]:
    return [special.get(token, NORMAL) for token in tokens]


# ------------------------------------------------------------------------------------------------------ byte-level
def test_a_word_that_is_a_token_stays_whole_where_llama_3_keeps_it(tmp_path: Path) -> None:
    tokens = [*LETTERS, "ab", "bc", "abc"]  # "abc" is reached by no merge
    for pre, expected in (("llama-bpe", ["abc"]), ("tekken", ["abc"]), ("qwen2", ["a", "bc"]), ("dbrx", ["a", "bc"])):
        _, tokenizer = read(tmp_path, tokens, pre=pre, merges=["b c", "a b"], add_bos_token=False)
        assert tokenizer.encode("abc").tokens == expected, pre


def bpe(word: str, merges: Sequence[tuple[str, str]]) -> list[str]:
    """llama.cpp's and everybody's: the best pair first, the leftmost of equals."""
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
    parts = list(word)
    while True:
        known = [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]
        if not known:
            return parts
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@st.composite
def merge_lists(draw: st.DrawFn) -> list[tuple[str, str]]:
    known, merges = list("abc"), list[tuple[str, str]]()
    for _ in range(draw(st.integers(1, 12))):
        pair = draw(st.sampled_from(known)), draw(st.sampled_from(known))
        merges.append(pair)
        if pair[0] + pair[1] not in known and len(pair[0] + pair[1]) < 7:
            known.append(pair[0] + pair[1])
    return [pair for pair in merges if pair[0] + pair[1] in known]


@settings(max_examples=40, deadline=None)
@given(merges=merge_lists(), words=st.lists(st.text("abc", min_size=1, max_size=12), min_size=1, max_size=5))
def test_merges_are_made_in_their_order_and_of_two_the_first_counts(
    merges: list[tuple[str, str]], words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokens = [*LETTERS, *dict.fromkeys(left + right for left, right in merges)]
    _, tokenizer = read(tmp_path_factory.mktemp("v"), tokens, merges=[f"{left} {right}" for left, right in merges] or [" "])
    for word in words:
        assert tokenizer.encode(word).tokens == bpe(word, merges)


TEXT = "Cửa Việt's 12345   x\tʼn 世界、カナ\n\n 3.5!? ÀÉ iPhone'LL नमस्ते  \r\n"  # noqa: RUF001
# What the name's pattern makes of TEXT; each was compared with llama.cpp on 560 texts.
PIECES: dict[str, str] = json.loads((Path(__file__).with_name("gguf_pieces.json")).read_text(encoding="utf-8"))


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_every_name_of_a_splitting_splits_as_llama_cpp_does(pre: str) -> None:
    patterns = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in SPLITTINGS[pre].patterns]
    pieces = [piece for piece, _ in pre_tokenizers.Sequence(patterns).pre_tokenize_str(TEXT)]
    assert "".join(pieces) == TEXT
    assert "¦".join(pieces) == PIECES[pre]


def test_flags_of_the_names() -> None:
    whole = {name for name, splitting in SPLITTINGS.items() if splitting.ignore_merges}
    llama3 = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"}
    assert whole == llama3 | {"tekken", "glm4", "glm5", "youtu", "minicpm5", "granite-embed-multi-97m"}
    assert {name for name, splitting in SPLITTINGS.items() if splitting.add_bos} == llama3 | {"tekken", "chameleon"}


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
@pytest.mark.parametrize("asked", [None, True, False])
def test_bos_is_added_where_the_file_or_else_the_name_asks_for_it(pre: str, asked: bool | None, tmp_path: Path) -> None:
    tokens = ["<|begin|>", *LETTERS]
    types = types_of(tokens, {"<|begin|>": CONTROL})
    _, tokenizer = read(tmp_path, tokens, pre=pre, token_type=types, bos_token_id=0, add_bos_token=asked)
    wanted = asked if asked is not None else pre == "llama-bpe"
    assert tokenizer.encode("a").tokens == (["<|begin|>", "a"] if wanted else ["a"])
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


def test_eos_is_added_where_the_file_asks_for_it(tmp_path: Path) -> None:
    tokens = ["<e>", *LETTERS]
    _, tokenizer = read(tmp_path, tokens, token_type=types_of(tokens, {"<e>": CONTROL}), eos_token_id=0, add_eos_token=True)
    assert tokenizer.encode("a").tokens == ["a", "<e>"]


def test_a_bos_that_the_file_does_not_name_is_not_made_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, tokenizer = read(tmp_path, list(LETTERS), pre="llama-bpe")
    assert tokenizer.encode("a").tokens == ["a"]
    assert "asks for a BOS around texts and does not say which token" in caplog.text


def test_a_missing_pre_is_llama_cpps_default_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = [*LETTERS, "12", "123"]
    _, tokenizer = read(tmp_path, tokens, pre=None, merges=["1 2", "12 3"])
    assert tokenizer.encode("a1234").tokens == ["a", "123", "4"]
    assert "has no tokenizer.ggml.pre" in caplog.text


def test_special_and_user_defined_tokens_are_found_first(tmp_path: Path) -> None:
    tokens = ["<|x|>", "ab ", *LETTERS]
    _, tokenizer = read(tmp_path, tokens, token_type=types_of(tokens, {"<|x|>": CONTROL, "ab ": USER}))
    ids = tokenizer.encode("ab c<|x|>").ids
    assert [tokens[token] for token in ids] == ["ab ", "c", "<|x|>"]
    assert tokenizer.decode(ids) == "ab c"


# --------------------------------------------------------------------------------------------------- SentencePiece
def sentencepiece(extra: Sequence[str], special: Mapping[str, int] | None = None) -> dict[str, Any]:
    """tokens, token_type and scores: <unk> <s> </s>, the bytes, then `extra`, the best first."""
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *extra]
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, **dict.fromkeys(byte_tokens, BYTE), **(special or {})}
    scores = [0.0] * 259 + [-float(i) for i in range(len(extra))]
    return {"tokens": tokens, "model": "llama", "pre": "default", "token_type": types_of(tokens, kinds), "scores": scores}


def test_a_space_goes_before_every_text_and_after_every_special_token(tmp_path: Path) -> None:
    vocabulary = sentencepiece(["▁hi", "hi", "▁h", "▁", "h", "i"])
    _, tokenizer = read(tmp_path, **vocabulary)
    tokens = vocabulary["tokens"]
    for text, expected in (
        ("hi", ["<s>", "▁hi"]),
        (" hi", ["<s>", "▁", "▁hi"]),
        ("<s>hi</s>", ["<s>", "<s>", "▁hi", "</s>"]),
        ("</s> hi", ["<s>", "</s>", "▁", "▁hi"]),
        ("", ["<s>"]),
    ):
        assert [tokens[token] for token in tokenizer.encode(text).ids] == expected, text
    assert tokenizer.decode(tokenizer.encode(" hi  hi").ids) == " hi  hi"


def test_no_space_is_put_before_a_text_where_the_file_says_so(tmp_path: Path) -> None:
    _, tokenizer = read(tmp_path, **sentencepiece(["▁hi", "hi", "▁h", "▁", "h", "i"]), add_space_prefix=False, add_bos_token=False)
    assert tokenizer.encode("hi hi").tokens == ["hi", "▁hi"]
    assert tokenizer.decode(tokenizer.encode(" hi").ids) == " hi"


def test_letters_that_are_no_tokens_become_bytes(tmp_path: Path) -> None:
    _, tokenizer = read(tmp_path, **sentencepiece(["▁", "h"]), add_bos_token=False)
    assert tokenizer.encode("hé\n").tokens == ["▁", "h", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert tokenizer.decode(tokenizer.encode("hé\n").ids) == "hé\n"


def merge_by_scores(text: str, scores: Mapping[str, float]) -> list[str]:
    """llm_tokenizer_spm_session::tokenize: the pair whose token has the highest score, the leftmost of equals."""
    parts = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.text("ab▁", min_size=2, max_size=5), unique=True, max_size=14),
    order=st.randoms(use_true_random=False),
    texts=st.lists(st.text("ab é", max_size=14), min_size=1, max_size=5),
)
def test_tokens_are_put_together_by_score(words: list[str], order: Any, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    extra = [*words, "▁", "a", "b"]
    order.shuffle(extra)
    vocabulary = sentencepiece(extra)
    scores = dict(zip(vocabulary["tokens"], vocabulary["scores"], strict=True))
    _, tokenizer = read(tmp_path_factory.mktemp("v"), **vocabulary, add_bos_token=False)
    for text in texts:
        letters = merge_by_scores("▁" + text.replace(" ", "▁"), scores) if text else []
        expected = [token for part in letters for token in ([part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()])]
        assert tokenizer.encode(text).tokens == expected, text


# --------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "gemma4", "hybriddna", "whitespace", "none", "no_vocab", "something"])
def test_a_vocabulary_of_another_model_is_refused_by_name(model: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.model .*'{model}'") as caught:
        read(tmp_path, list(LETTERS), model=model)
    assert "llama" in str(caught.value)


@pytest.mark.parametrize("pre", ["gemma4", "sarvam-moe", "whitespace", "granite-embed-multi-311m", "made-up", 7])
def test_a_splitting_that_is_not_known_is_refused_by_name(pre: str | int, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.pre '?{pre}'? is not supported"):
        read(tmp_path, list(LETTERS), pre=pre)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no merges": ({"merges": None}, r"has no tokenizer\.ggml\.merges: a byte-level vocabulary does not say without them"),
    "no tokens": ({"tokens": None}, r"tokenizer\.ggml\.tokens must be an array of strings, got None"),
    "numbers as tokens": ({"tokens": [1, 2]}, r"tokenizer\.ggml\.tokens must be an array of strings"),
    "a token twice": ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "the token 'a' is in tokenizer.ggml.tokens twice"),
    "types of some tokens": ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 items, tokenizer.ggml.tokens has 256"),
    "types as text": ({"token_type": ["a"]}, "tokenizer.ggml.token_type must be an array of numbers"),
    "merges as numbers": ({"merges": [1, 2]}, "tokenizer.ggml.merges must be an array of strings"),
    "a merge into nothing": ({"merges": ["a b"]}, "tokenizer.ggml.merges: 'a b' needs 'ab', which is none of the tokens"),
    "a merge of nothing": ({"merges": ["ab c"]}, "tokenizer.ggml.merges: 'ab c' needs 'ab'"),
    "BOS is no number": ({"bos_token_id": "x"}, "tokenizer.ggml.bos_token_id must be a token id, got 'x'"),
    "BOS or not": ({"add_bos_token": 3}, "tokenizer.ggml.add_bos_token must be true or false, got 3"),
    "a list of ends that are no ids": ({"eos_token_ids": [1.5, float("nan")]}, "tokenizer.ggml.eos_token_ids must be token ids, got"),
    "no model": ({"model": None}, "tokenizer.ggml.model must be 'llama' or 'gpt2', got None"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_broken_byte_level_vocabulary_is_a_sentence(what: str, tmp_path: Path) -> None:
    keys, message = REFUSED[what]
    tokens = list(LETTERS)
    path = write_vocabulary(tmp_path / "v.gguf", tokens, **{"tokens": tokens, **keys})
    with pytest.raises(ModelError, match=message):
        tokenizer_json(read_vocabulary(GGUFFile(path)), path=path)


def test_sentencepiece_without_an_order_of_its_tokens_is_refused(tmp_path: Path) -> None:
    vocabulary = sentencepiece(["ab", "bc", "abc", "a", "b", "c"])
    with pytest.raises(ModelError, match=r"has no tokenizer\.ggml\.scores"):
        read(tmp_path, **{**vocabulary, "scores": None})
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.scores: 3 of 3 tokens have the score -1000"):
        read(tmp_path, **{**vocabulary, "scores": [-1000.0] * len(vocabulary["tokens"])})
    with pytest.raises(ModelError, match="a score that is not a number"):
        read(tmp_path, **{**vocabulary, "scores": [float("nan")] * len(vocabulary["tokens"])})


def test_tokens_too_long_to_be_put_together_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="too long tokens for a SentencePiece vocabulary, of up to 20000 letters"):
        read(tmp_path, **sentencepiece(["a" * 20000, "a"]))


def test_a_token_of_a_letter_that_is_no_token_is_refused(tmp_path: Path) -> None:
    """llama.cpp would put it together all the same; `tokenizers` cannot."""
    with pytest.raises(ModelError, match="'ab' can be put together from 'b', which is no token"):
        read(tmp_path, **sentencepiece(["ab", "a"]))


# --------------------------------------------------------------------------------------------------------- stop ids
ENDS = [
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>"),
    *("</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
    *("<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "<|file_sep|>",
]


@pytest.mark.parametrize("text", ENDS)
def test_a_token_ends_a_turn_by_its_text_alone(text: str, tmp_path: Path) -> None:
    """It also becomes a special token: models' files often call it a normal one."""
    vocabulary, tokenizer = read(tmp_path, [*LETTERS, text])
    assert vocabulary.ends == {256}
    assert tokenizer.encode(f"a{text}").ids == [tokenizer.token_to_id("a"), 256]
    assert tokenizer.decode([256]) == ""


@pytest.mark.parametrize("key", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_a_token_ends_a_turn_by_its_key_alone(key: str, tmp_path: Path) -> None:
    vocabulary, _ = read(tmp_path, [*LETTERS, "<my-end>"], **{f"{key}_token_id": 256})
    assert vocabulary.ends == {256}


def test_a_list_of_ends_counts_and_what_is_no_token_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vocabulary, _ = read(tmp_path, [*LETTERS, "<1>", "<2>"], eos_token_ids=[256, 257, 999, -1])
    assert vocabulary.ends == {256, 257}
    assert "tokenizer.ggml.eos_token_ids has [-1, 999], which are none of the 258 tokens; left out" in caplog.text


def test_types_that_are_no_whole_numbers_are_those_of_undefined_tokens(tmp_path: Path) -> None:
    vocabulary, _ = read(tmp_path, list(LETTERS), token_type=[float("nan"), 3.0, *[1.0] * 254])
    assert vocabulary.types[:3] == (TokenType.UNDEFINED, TokenType.CONTROL, TokenType.NORMAL)


def test_all_places_count_together(tmp_path: Path) -> None:
    tokens = [*LETTERS, "<1>", "<2>", "<3>", "<|eot_id|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_pad|>"]
    vocabulary, _ = read(tmp_path, tokens, eos_token_id=256, eot_token_id=257, eom_token_id=258)
    assert {tokens[token] for token in vocabulary.ends} == {"<1>", "<2>", "<3>", "<|eot_id|>", "<|im_end|>", "<|fim_pad|>"}


@pytest.mark.parametrize("others", [("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>"), ("<|call|>", "<|flush|>")])
def test_the_end_of_a_part_of_an_answer_is_no_end(others: tuple[str, str], tmp_path: Path) -> None:
    tokens = [*LETTERS, "<|end|>", *others]
    vocabulary, tokenizer = read(tmp_path, tokens)
    assert {tokens[token] for token in vocabulary.ends} == set(others)
    assert tokenizer.decode([256]) == "<|end|>"


def test_an_id_that_is_no_token_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys: dict[str, Any] = {f"{name}_token_id": 300 for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    vocabulary, _ = read(tmp_path, [*LETTERS, "<|im_end|>"], **keys, add_bos_token=True)
    assert vocabulary.ends == {256}
    assert dict(vocabulary.special) == {}
    assert caplog.text.count("is 300, which is none of the 257 tokens; left out") == 6


def resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: Mapping[str, Any]) -> Any:
    monkeypatch.setenv("AIOENGINE_CACHE", str(tmp_path / "cache"))
    changed = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    path = write_gguf(random_model(cases()["llama"]), tmp_path / "m.gguf", "llama", extra=lambda writer: put(writer, changed))
    return resolve_model(str(path))


def test_stop_ids_and_special_tokens_reach_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ["<unk>", "<s>", "<|im_end|>", "<|eot|>", *list(LETTERS)[:92]]
    keys = {"tokens": tokens, "token_type": [2, 3, 1, 3, *[1] * 92], "merges": [" "], "eos_token_id": 900, "bos_token_id": -1}
    files = resolved(tmp_path, monkeypatch, keys)
    info = read_model_info(files)
    assert info.eos_token_ids == {2, 3}
    assert info.bos_token_id is None
    assert load_tokenizer(files.folder).special_token_ids == {0, 1, 2, 3}


def test_more_tokens_than_the_embedding_has_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [*LETTERS]
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens has 256 tokens, the embedding token_embd\.weight only 96 rows"):
        resolved(tmp_path, monkeypatch, {"tokens": tokens, "token_type": [1] * 256, "merges": [" "]})


def test_fewer_tokens_than_rows_are_a_padded_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolved(tmp_path, monkeypatch, {"tokens": list(LETTERS)[:90], "token_type": [1] * 90, "merges": [" "]})
    assert read_model_info(files).vocab_size == 96
    assert load_tokenizer(files.folder).vocab_size == 90


def test_a_file_of_a_vocabulary_alone_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AIOENGINE_CACHE", str(tmp_path / "cache"))
    path = write_vocabulary(tmp_path / "v.gguf", list(LETTERS))
    with pytest.raises(ModelError, match=r"llama\.embedding_length must be a positive number"):
        resolve_model(str(path))
