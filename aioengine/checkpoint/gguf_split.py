# ruff: noqa: RUF001  (letters of many scripts are what this file is about)
"""How a byte-level vocabulary out of GGUF cuts a text into words before it merges: by the name in `tokenizer.ggml.pre`.

Names, patterns and flags are those of llama.cpp (src/llama-vocab.cpp as llama-cpp-python 0.3.36 carries it), for which such files are made:
a name that is not here is refused. Where llama.cpp's pattern is simpler than the one in the model's own tokenizer.json ("tekken" and
"gpt-4o" do not tell capital from small letters outside ASCII), the name stands for llama.cpp's. Patterns are in Oniguruma's syntax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Splitting:
    """Each pattern splits the pieces that the one before it left; what no pattern matches is a piece as well."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token stays whole
    add_bos: bool = False  # unless `tokenizer.ggml.add_bos_token` says otherwise


_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_HAN = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}\x{2B820}-\x{2CEAF}"
    r"\x{2CEB0}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)
# Groups of three digits counted from the right; llama.cpp leaves what stands before a number with its first group.
_DIGITS_FROM_THE_RIGHT = r"[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_LETTERS_AND_MARKS = rf"{_ASCII_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_JAIS2_SPACES = r"\s*[\r\n]+|" + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"\s{1,2}(?!\S)|\s{1}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# White space is no letter to llama.cpp, though the range from U+0800 holds some.
_HAN_AND_HANGUL = r"[[一-龥ࠀ-一가-\x{d7ff}]&&[^\s]]+"
_DEEPSEEK_LETTERS = (
    "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_ASIAN = "[一-鿿㐀-䶿豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"


def _cased(first: str, second: str, *, digits: str, contraction: str = "") -> str:
    """Words whose capitals come first. `first`, `second`: what counts as a capital and as a small letter."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{first}*{second}+{contraction}|{lead}{first}+{second}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_NOT_SMALL, _NOT_CAPITAL = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_MARKED_NOT_SMALL, _MARKED_NOT_CAPITAL = r"[[\p{L}\p{M}]&&[^a-z]]", r"[[\p{L}\p{M}]&&[^A-Z]]"
_TEKKEN = _cased(_NOT_SMALL, _NOT_CAPITAL, digits=r"\p{N}")
_GPT4O = _cased(_NOT_SMALL, _NOT_CAPITAL, digits=r"\p{N}{1,3}", contraction=_CONTRACTION + "?")
_LETTER_OR_MARK = r"[\p{L}\p{M}]"
_KIMI = rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}{_HAN}]?[\p{{L}}&&[^{_HAN}]]+{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"

# Pattern of a missing `tokenizer.ggml.pre`, as llama.cpp has it; also called "default".
DEFAULT = Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

_GPT2_ONLY = Splitting((_GPT2,))
_DIGIT_THEN_GPT2 = Splitting((r"\p{N}", _GPT2))
_LLAMA3_ONLY = Splitting((_LLAMA3,))
_QWEN2_ONLY = Splitting((_QWEN2,))
_LLAMA3_WHOLE = Splitting((_LLAMA3,), ignore_merges=True, add_bos=True)
_DEEPSEEK3 = Splitting((r"\p{N}{1,3}", _CJK, _LETTERS_AND_MARKS))
_BAILING = Splitting((rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|\s+(?!\S)|\s+",))
_AYA = Splitting(
    (
        _DIGITS_FROM_THE_RIGHT,
        _cased(_LETTER_OR_MARK, _LETTER_OR_MARK, digits=r"\p{N}{1,3}", contraction=_CONTRACTION + "?"),
    )
)

_BY_SPLITTING: tuple[tuple[Splitting, tuple[str, ...]], ...] = (
    (DEFAULT, ("default",)),
    (
        _GPT2_ONLY,
        (
            *("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "modern-bert"),
            *("jina-v1-en", "jina-v2-code", "roberta-bpe", "exaone4", "mpt", "olmo", "jais", "trillion", "granite-docling"),
        ),
    ),
    (_DIGIT_THEN_GPT2, ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2")),
    (
        _LLAMA3_WHOLE,
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    ),
    (_LLAMA3_ONLY, ("dbrx", "smaug-bpe", "chatglm-bpe")),
    (Splitting((_LLAMA3,), ignore_merges=True), ("glm4", "glm5")),
    (
        _QWEN2_ONLY,
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "hunyuan", "solar-open", "megrez", "grok-2"),
    ),
    (
        Splitting((rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",)),
        ("qwen35",),
    ),
    (Splitting((rf"{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}",)), ("ufakzeka",)),
    (Splitting((rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_JAIS2_SPACES}",)), ("jais-2",)),
    (
        Splitting((r"[\r\n]", rf"\s?{_DEEPSEEK_LETTERS}", r"\s?[!-/:-~！-／：-～‘-‟、-。]+", r"\s+$", _HAN_AND_HANGUL, r"\p{N}+")),
        ("deepseek-llm",),
    ),
    (Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")), ("deepseek-coder",)),
    (_DEEPSEEK3, ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4")),
    (
        Splitting(
            (
                r"\p{N}{1,3}",
                _CJK,
                rf"{_ASCII_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
                r"\p{N}",
            )
        ),
        ("spark2_5",),
    ),
    (
        Splitting(
            (
                f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_CJK}",
                _cased(_LETTER_OR_MARK, _LETTER_OR_MARK, digits=r"\p{N}", contraction=_CONTRACTION + "?"),
            ),
            ignore_merges=True,
        ),
        ("youtu",),
    ),
    (Splitting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), ("falcon",)),
    (Splitting((_BLOOM,)), ("poro-chat", "bloom", "gpt3-finnish")),
    (Splitting((_BLOOM, r"\p{N}")), ("viking",)),
    (Splitting((_TEKKEN,), ignore_merges=True, add_bos=True), ("tekken",)),
    (
        Splitting(
            (
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
        ("chameleon",),
    ),
    (Splitting((_GPT4O,)), ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")),
    (
        Splitting(
            (_cased(_MARKED_NOT_SMALL, _MARKED_NOT_CAPITAL, digits=r"\p{N}{1,3}", contraction=_CONTRACTION + "?"),), ignore_merges=True
        ),
        ("granite-embed-multi-97m",),
    ),
    (_AYA, ("tiny_aya", "cohere2moe")),
    (Splitting((_KIMI,)), ("kimi-k2",)),
    (Splitting((r"\p{N}+", "(?=([0-9]{3})+(?![0-9]))")), ("superbpe",)),
    (_BAILING, ("bailingmoe", "bailingmoe2", "llada-moe")),
    (
        Splitting((rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
        ("seed-coder",),
    ),
    (Splitting((_DIGITS_FROM_THE_RIGHT, _ASIAN, _LETTERS_AND_MARKS)), ("afmoe",)),
    (Splitting((r"[^\n]+|[\n]+", _QWEN2)), ("laguna",)),
    (
        Splitting(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
        ("exaone-moe",),
    ),
    (Splitting((r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_SPACES}"), ignore_merges=True), ("minicpm5",)),
)

SPLITTINGS: Mapping[str, Splitting] = MappingProxyType({name: splitting for splitting, names in _BY_SPLITTING for name in names})
