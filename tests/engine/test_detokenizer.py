"""Text comes out whole, in pieces that add up, and ends where a stop string says so."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from aioengine.engine.outputs.detokenizer import Detokenizer, IncrementalDecoder, TextTokenizer, find_stop_string
from aioengine.sampling_params import SamplingParams
from aioengine.testing import FakeTokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog. " * 5,
    "你好世界 こんにちは 안녕하세요 " * 10,
    "👩‍🚀🚀🎉 naïve café " * 10,
    "def f(x):\n    return x\n" * 5,
]


class BackendTokenizer(FakeTokenizer):
    """A `tokenizers.Tokenizer` behind the interface that the engine uses."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        self.special_token_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size = backend.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def _byte_level() -> BackendTokenizer:
    """GPT-2's kind: tokens are byte strings, so a character may be spread over several."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return BackendTokenizer(backend)


def _byte_fallback() -> BackendTokenizer:
    """Llama 2's kind: words with a leading space mark, single bytes for the rest, the first space of a text is dropped."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "the", "▁hello", "hello", "好"]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return BackendTokenizer(backend)


BYTE_LEVEL = _byte_level()
BYTE_FALLBACK = _byte_fallback()
FAKE = FakeTokenizer()


def pieces_of(tokenizer: TextTokenizer, token_ids: Sequence[int], *, prompt: Sequence[int] = (), skip: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, prompt_token_ids=prompt, skip_special_tokens=skip)
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.flush()]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=80), st.booleans())
def test_any_token_ids_give_the_text_of_the_full_decode(token_ids: list[int], skip: bool) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, token_ids, skip=skip)) == BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK, FAKE])
def test_no_piece_holds_half_a_character(tokenizer: TextTokenizer, text: str) -> None:
    text = text.replace("\ufffd", "?")
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    expected = tokenizer.decode(token_ids)
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == expected
    assert all("\ufffd" not in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, BYTE_FALLBACK.vocab_size - 1), max_size=60))
def test_broken_bytes_of_a_byte_fallback_vocabulary_never_raise(token_ids: list[int]) -> None:
    """The full decode of such ids changes characters that came long before; what was shown stays as it was."""
    text = "".join(pieces_of(BYTE_FALLBACK, token_ids))
    assert isinstance(text, str)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 400), st.sampled_from([2**31, 2**32 - 1])), max_size=40))
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
def test_ids_that_the_tokenizer_does_not_know_give_no_text_and_no_error(tokenizer: TextTokenizer, token_ids: list[int]) -> None:
    """A model may have more rows than its tokenizer has tokens."""
    assert all(isinstance(piece, str) for piece in pieces_of(tokenizer, token_ids))
    unknown = [token_id for token_id in token_ids if token_id >= 400]
    assert pieces_of(tokenizer, unknown) == [""] * (len(unknown) + 1)


def test_long_runs_of_broken_bytes_neither_stall_nor_are_lost() -> None:
    token_ids = FAKE.encode("ab", add_special_tokens=False) + [0x80] * 500
    pieces = pieces_of(FAKE, token_ids)
    assert "".join(pieces) == FAKE.decode(token_ids)
    assert "".join(pieces[:250]).count("\ufffd") > 200


@pytest.mark.parametrize("text", ["🚀🚀", "👩‍🚀 ok", "你好。世界", "e\u0301a", " leading", " \U00010000", "the  two  spaces", "\n\n\ttabs"])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK, FAKE])
def test_known_difficult_texts(tokenizer: TextTokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_a_character_appears_with_its_last_byte() -> None:
    assert pieces_of(FAKE, list("€!".encode())) == ["", "", "€", "!", ""]
    assert pieces_of(FAKE, list("€".encode())[:2]) == ["", "", "\ufffd"]


def test_a_continuation_keeps_its_leading_space() -> None:
    vocabulary = BYTE_FALLBACK.backend.get_vocab()
    the, hello = vocabulary["▁the"], vocabulary["▁hello"]
    prompt = [the]
    assert pieces_of(BYTE_FALLBACK, [hello, the, hello], prompt=prompt) == [" hello", " the", " hello", ""]
    assert pieces_of(BYTE_FALLBACK, [the] * 100, prompt=prompt)[99] == " the"


def test_special_tokens_are_skipped_or_shown() -> None:
    token_ids = [97, 258, 98, 256]
    assert pieces_of(FAKE, token_ids) == ["a", "", "b", "", ""]
    assert pieces_of(FAKE, token_ids, skip=False) == ["a", "<|user|>", "b", "<eos>", ""]


def _word_pieces() -> BackendTokenizer:
    """BERT's kind: its decoder puts a space before every token that begins a word."""
    backend = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "hello": 3, "world": 4}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("[UNK]", "[CLS]", "[SEP]")])
    return BackendTokenizer(backend)


@pytest.mark.parametrize(
    ("skip", "spaces", "text"),
    [
        (False, True, " hello [SEP] [CLS] world [SEP] [SEP] hello"),
        (False, False, " hello [SEP][CLS] world [SEP][SEP] hello"),
        (True, True, " hello world hello"),
        (True, False, " hello world hello"),
    ],
)
def test_spaces_between_special_tokens(skip: bool, spaces: bool, text: str) -> None:
    params = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    detokenizer = Detokenizer(_word_pieces(), prompt_token_ids=[4], sampling_params=params)
    shown = ""
    for token_id in [3, 2, 1, 4, 2, 2, 3]:
        detokenizer.push(token_id)
        shown += detokenizer.take()[0]
    assert shown == text


# ---------------------------------------------------------------------------------------------------- stop strings
def run(text_tokens: Sequence[str], **params: Any) -> tuple[str, str | None, list[str]]:
    """Push tokens (given as text) until a stop string is found; returns the text, the stop string, and the text after each."""
    pieces = [token.encode() for token in text_tokens]

    class TextTokens(FakeTokenizer):
        special_token_ids = frozenset()

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            return b"".join(pieces[token_id] for token_id in token_ids).decode(errors="replace")

    detokenizer = Detokenizer(TextTokens(), prompt_token_ids=[], sampling_params=SamplingParams(max_tokens=None, **params))
    text, shown = "", []
    for token_id in range(len(pieces)):
        stop = detokenizer.push(token_id)
        text += detokenizer.take()[0]
        shown.append(text)
        if stop is not None:
            return text, stop, shown
    stop = detokenizer.finish()
    return text + detokenizer.take()[0], stop, shown


def test_a_stop_string_across_tokens_is_cut_off_and_never_shown() -> None:
    text, stop, shown = run(["one ", "E", "N", "D", " two"], stop="END")
    assert (text, stop) == ("one ", "END")
    assert shown == ["one ", "one ", "one ", "one "]


def test_what_only_began_like_a_stop_string_is_shown_as_soon_as_it_is_not_one() -> None:
    text, stop, shown = run(["a", "E", "N", "d", "EN"], stop="END")
    assert (text, stop) == ("aENdEN", None)
    assert shown == ["a", "a", "a", "aENd", "aENd"]


def test_only_a_possible_beginning_is_held_back() -> None:
    assert run(["xxaab"], stop=["aabc", "zzz"])[2] == ["xx"]
    assert run(["xxaaz"], stop=["aabc", "zzz"])[2] == ["xxaa"]


def test_include_stop_str_in_output() -> None:
    text, stop, shown = run(["one E", "ND two"], stop="END", include_stop_str_in_output=True)
    assert (text, stop) == ("one END", "END")
    assert shown[0] == "one E", "nothing has to be held back: it is shown in any case"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(["abcde"], stop=["bcde", "cd"])[:2] == ("ab", "cd")
    assert run(["abcd"], stop=["cd", "bcd"])[:2] == ("a", "bcd"), "of two that end together the longer one"


def test_min_tokens_puts_stop_strings_off() -> None:
    assert run(["END", "a", "END", "b"], stop="END", min_tokens=1)[:2] == ("ENDa", "END")
    assert run(["END", "a", "END", "b"], stop="END", min_tokens=3)[:2] == ("ENDaENDb", None)
    assert run(["EN", "D", "b"], stop="END", min_tokens=1)[:2] == ("", "END"), "the token that completes it counts"


def test_a_stop_string_inside_an_unfinished_character_does_not_match() -> None:
    assert run(["a", "é"], stop="é")[:2] == ("a", "é")


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abé", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    stop=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_the_result_does_not_depend_on_the_token_borders(text: str, cuts: list[int], stop: list[str], include: bool) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    tokens = [text[a:b] for a, b in itertools.pairwise(borders)]
    result, found, shown = run(tokens, stop=stop, include_stop_str_in_output=include)
    # The oracle reads character by character and looks at the end of what it has.
    expected, expected_stop = text, None
    for end in range(1, len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            expected_stop = max(matches, key=len)
            expected = text[:end] if include else text[: end - len(expected_stop)]
            break
    assert (result, found) == (expected, expected_stop)
    assert all(result.startswith(earlier) for earlier in shown), "what was shown is never taken back"


def test_find_stop_string_looks_only_where_something_is_new() -> None:
    assert find_stop_string("ENDxx", ["END"], new_from=3) is None
    assert find_stop_string("ENDxEND", ["END"], new_from=6) == ("END", 4)


# ---------------------------------------------------------------------------------------------------- special tokens as stop strings
def run_detokenizer(token_ids: Sequence[int], **options: Any) -> tuple[str, str | None, int]:
    """The text, the stop string, and how many tokens were pushed."""
    detokenizer = Detokenizer(FAKE, prompt_token_ids=[], sampling_params=SamplingParams(**options))
    text, num_visible = "", 0
    for count, token_id in enumerate(token_ids, 1):
        stop = detokenizer.push(token_id)
        piece, num_tokens = detokenizer.take()
        text, num_visible = text + piece, num_visible + num_tokens
        if stop is not None:
            assert num_visible == count, "the tokens of the stop string are handed out with it"
            return text, stop, count
    stop = detokenizer.finish()
    piece, num_tokens = detokenizer.take()
    assert num_visible + num_tokens == len(token_ids)
    return text + piece, stop, len(token_ids)


USER = 258
TURN = [*b"ab", USER, *b"cd"]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(
    ("stop", "before", "num_tokens"),
    [
        ("<|user|>", "ab", 3),
        ("b<|user|>", "a", 3),
        ("<|user|>c", "ab", 4),
        ("b<|user|>cd", "a", 5),
    ],
)
def test_the_text_of_a_special_token_stops_whether_it_is_shown_or_not(
    stop: str, before: str, num_tokens: int, include: bool, skip: bool
) -> None:
    found = run_detokenizer(TURN, stop=[stop, "never"], include_stop_str_in_output=include, skip_special_tokens=skip)
    assert found == (before + (stop if include else ""), stop, num_tokens)


def test_a_special_token_that_stops_nothing_stays_hidden() -> None:
    assert run_detokenizer(TURN, stop="<|user|>x") == ("abcd", None, 5)
    assert run_detokenizer(TURN, stop="<|user|>x", include_stop_str_in_output=True) == ("abcd", None, 5)
    assert run_detokenizer(TURN, stop=["x<|user|>", "<|user|><|user|>"]) == ("abcd", None, 5)
    # A part of its text is no text of the output, and what it stands between belongs together.
    assert run_detokenizer(TURN, stop="user") == ("abcd", None, 5)
    assert run_detokenizer(TURN, stop="bc") == ("a", "bc", 4)
    assert run_detokenizer([USER, *TURN], stop="<|user|>", min_tokens=1) == ("ab", "<|user|>", 4)


@settings(max_examples=150, deadline=None)
@given(
    token_ids=st.lists(st.sampled_from([97, 98, 256, 258, 0xE2, 0x82, 0xAC]), max_size=12),
    stop=st.lists(st.sampled_from(["<|user|>", "a<eos>", "<eos>b", "<|user|><eos>", "ab", "b<|user|>a"]), min_size=1, max_size=2),
)
def test_what_is_shown_with_special_tokens_hidden_is_the_shown_text_without_them(token_ids: list[int], stop: list[str]) -> None:
    """The oracle is the run that shows them, as long as no half characters lie between."""
    hidden = run_detokenizer(token_ids, stop=stop)
    shown = run_detokenizer(token_ids, stop=stop, skip_special_tokens=False)
    if not bytes(token for token in token_ids if token < 256).isascii():
        return  # bytes on both sides of a hidden token may be one character, which is text of neither side
    # "ab" is found across a hidden token only where that is no part of a stop string.
    if hidden[1:] == shown[1:]:
        assert hidden[0] == shown[0].replace("<|user|>", "").replace("<eos>", "")
    if shown[1] is not None and "<" in shown[1]:
        assert hidden[2] <= shown[2], "found later, or not at all"
