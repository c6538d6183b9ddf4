"""Folders of the Hugging Face layout: ids and rendered chats equal AutoTokenizer's and apply_chat_template's, whatever the files say."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, processors

from aioengine.checkpoint import tokenizer_files
from aioengine.checkpoint.tokenizer import Tokenizer, load_tokenizer
from aioengine.errors import InvalidRequestError
from tests.tiny_tokenizer import byte_level_tokenizer

logging.getLogger("transformers").setLevel(logging.ERROR)

TEXTS = ("Hello, world", " a  b\n", "<s>hi</s>", "<|im_start|>user<|im_end|>", "<extra>x <more>", "Grüße 世界", "12345", "[INST]<pad>")
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "Hi </s> there"},
    {"role": "assistant", "content": "<extra>", "tool_calls": None, "reasoning_content": "hm"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"ä": {"type": "string"}}}}}]
# Everything that a template may look at.
SEES_ALL = (
    "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ image_token }}|{% if tools is defined %}defined {% endif %}"
    "{% if tools is not none %}{{ tools | tojson }}{% endif %}{% if documents is not none %}{{ documents[0].title }}{% endif %}"
    "{% for m in messages %}\n  {% if m.tool_calls is defined %}calls{% endif %}\n"
    "{{ m.role }}: {{ m.content }} {{ m.thinking }}\n{% endfor %}"
    "{{ add_generation_prompt }} {{ enable_thinking }} {{ date_string is defined }}"
)


def bpe() -> tokenizers.Tokenizer:
    backend = byte_level_tokenizer(["<s>", "</s>", "<unk>", "<|im_start|>"])
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def bpe_with_bos() -> tokenizers.Tokenizer:
    backend = bpe()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 0)])
    backend.add_tokens([AddedToken("<extra>", normalized=False, lstrip=True)])
    return backend


def sentencepiece_like() -> tokenizers.Tokenizer:
    """As Llama 2's tokenizer.json: a space before each piece of text, bytes for what is not in the vocabulary."""
    letters = [chr(code) for code in range(33, 127)]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters, "▁H", "▁a", "ll"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "H"), ("▁", "a"), ("l", "l")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return backend


BACKENDS = {"bpe": bpe, "bpe with bos": bpe_with_bos, "sentencepiece": sentencepiece_like}


def special(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, **flags}


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


TOKEN = st.sampled_from(["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<more>", "<pad>"])
STORED_TOKEN = TOKEN | TOKEN.map(lambda text: {"__type": "AddedToken", **special(text)})
TOKENIZER_CONFIG = st.fixed_dictionaries(
    {},
    optional={
        "tokenizer_class": st.sampled_from(
            ["PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer", "NoSuchTokenizer"]
        ),
        "bos_token": STORED_TOKEN | st.none(),
        "eos_token": STORED_TOKEN,
        "pad_token": STORED_TOKEN,
        "image_token": TOKEN,
        "add_bos_token": st.booleans(),
        "add_eos_token": st.booleans(),
        "add_prefix_space": st.booleans(),
        "legacy": st.booleans(),
        "split_special_tokens": st.booleans(),
        "additional_special_tokens": st.lists(TOKEN, max_size=2, unique=True),
        "extra_special_tokens": st.lists(TOKEN, max_size=2, unique=True) | st.just({"vision_token": "<more>"}),
        "added_tokens_decoder": st.sampled_from(
            [
                {"0": special("<s>", special=True)},
                {"400": special("<|im_end|>", special=True), "401": special("<extra>", special=False)},
                {"5": special("<pad>", special=True, lstrip=True)},
            ]
        ),
        "chat_template": st.sampled_from([SEES_ALL, "config {{ bos_token }}", [{"name": "default", "template": "list {{ eos_token }}"}]])
        | st.just([{"name": "default", "template": SEES_ALL}, {"name": "tool_use", "template": "with tools {{ tools | length }}"}]),
        "clean_up_tokenization_spaces": st.booleans(),
        "model_max_length": st.just(9),
    },
)
SPECIAL_TOKENS_MAP = st.fixed_dictionaries(
    {},
    optional={
        "bos_token": TOKEN | TOKEN.map(special),
        "eos_token": TOKEN | TOKEN.map(special),
        "additional_special_tokens": st.lists(TOKEN, max_size=2, unique=True),
    },
)
FOLDERS = st.fixed_dictionaries(
    {
        "backend": st.sampled_from(sorted(BACKENDS)),
        "model_type": maybe(st.sampled_from(["llama", "qwen2", "qwen3", "mistral", "nobody_knows"])),
        "tokenizer_config": maybe(TOKENIZER_CONFIG),
        "special_tokens_map": maybe(SPECIAL_TOKENS_MAP),
        "added_tokens": maybe(st.sampled_from([{"<extra>": 300}, {"<more>": 300, "<|im_end|>": 301}, {"<s>": 0}])),
        "chat_template.jinja": maybe(st.sampled_from([SEES_ALL, "file {{ bos_token }}{{ eos_token }}"])),
        "chat_template.json": maybe(st.just({"chat_template": "json"})),
        "additional": maybe(st.sampled_from(["tool_use", "rag"])),
    }
)


def write(folder: Path, drawn: Mapping[str, Any]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    BACKENDS[drawn["backend"]]().save(str(folder / "tokenizer.json"))
    if drawn["model_type"] is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": drawn["model_type"]}))
    for name in ("tokenizer_config", "special_tokens_map", "added_tokens", "chat_template.json"):
        if drawn[name] is not None:
            (folder / f"{name.removesuffix('.json')}.json").write_text(json.dumps(drawn[name]))
    if drawn["chat_template.jinja"] is not None:
        (folder / "chat_template.jinja").write_text(drawn["chat_template.jinja"])
    if drawn["additional"] is not None:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / f"{drawn['additional']}.jinja").write_text("additional {{ tools }}")
    return folder


def assert_same_ids(ours: Tokenizer, theirs: Any) -> None:
    assert ours.backend.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        for add in (True, False):
            assert ours.encode(text, add_special_tokens=add) == theirs(text, add_special_tokens=add)["input_ids"], (text, add)
    eos = theirs.eos_token_id
    assert eos is None or eos in ours.end_token_ids


def assert_same_chats(ours: Tokenizer, theirs: Any) -> None:
    for options in ({}, {"tools": TOOLS}, {"documents": [{"title": "T", "text": "x"}]}):
        for add in (True, False):
            try:
                expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add, enable_thinking=False, **options)
            except Exception:  # no template, or one that fails on this
                with pytest.raises(InvalidRequestError):
                    ours.apply_chat_template(MESSAGES, add_generation_prompt=add, **options)
                continue
            text = ours.apply_chat_template(MESSAGES, add_generation_prompt=add, variables={"enable_thinking": False}, **options)
            assert text == expected
            ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=add, enable_thinking=False, return_dict=False, **options)
            assert ours.encode(text, add_special_tokens=False) == ids


@given(drawn=FOLDERS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_folder_is_what_transformers_makes_of_it(drawn: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write(tmp_path_factory.getbasetemp() / "any-tokenizer", drawn)
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception:  # what it cannot read has no truth; we read its tokenizer.json, or say why not
        return
    for _ in range(2):  # read by transformers, then from the cache
        ours = load_tokenizer(folder)
        assert_same_ids(ours, theirs)
        assert_same_chats(ours, theirs)


def test_the_oracle_reads_most_of_these_folders(tmp_path: Path) -> None:
    """Else the test above would hold for nothing: every single choice is read."""
    plain: dict[str, Any] = dict.fromkeys(
        ("model_type", "tokenizer_config", "special_tokens_map", "added_tokens", "chat_template.jinja", "chat_template.json", "additional")
    )
    choices: list[dict[str, Any]] = [
        {"special_tokens_map": {"bos_token": "<|im_start|>"}, "chat_template.jinja": SEES_ALL},
        {"added_tokens": {"<more>": 300, "<|im_end|>": 301}},
        {"tokenizer_config": {"added_tokens_decoder": {"400": special("<|im_end|>", special=True)}, "chat_template": SEES_ALL}},
        {"tokenizer_config": {"split_special_tokens": True, "bos_token": "<s>"}},
        {"tokenizer_config": {"tokenizer_class": "LlamaTokenizer"}, "model_type": "llama", "backend": "sentencepiece"},
        {"tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer"}, "model_type": "qwen2"},
        {"additional": "tool_use", "chat_template.jinja": SEES_ALL},
        {"additional": "rag"},
    ]
    for index, choice in enumerate(choices):
        folder = write(tmp_path / str(index), {"backend": "bpe", **plain, **choice})
        theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        ours = load_tokenizer(folder)
        assert_same_ids(ours, theirs)
        assert_same_chats(ours, theirs)


def test_tokens_that_only_one_file_names_are_there(tmp_path: Path) -> None:
    none = dict.fromkeys(("model_type", "tokenizer_config", "special_tokens_map", "added_tokens", "chat_template.json", "additional"))
    base = {"backend": "bpe", **none, "chat_template.jinja": SEES_ALL}
    named = load_tokenizer(write(tmp_path / "map", {**base, "special_tokens_map": {"bos_token": "<|im_start|>"}}))
    assert named.apply_chat_template(MESSAGES).startswith("<|im_start|>|")
    decoder = {"added_tokens_decoder": {"260": special("<|im_end|>", special=True)}}
    added = load_tokenizer(write(tmp_path / "decoder", {**base, "tokenizer_config": decoder}))
    (end,) = added.encode("<|im_end|>")
    assert end == 260
    assert end in added.special_token_ids & added.end_token_ids
    legacy = load_tokenizer(write(tmp_path / "added", {**base, "added_tokens": {"<more>": 260}}))
    assert legacy.encode("<more>") == [260]


def test_a_chat_without_tools_does_not_look_like_one_with_tools(tmp_path: Path) -> None:
    template = "{% if tools is not none %}<tools>{{ tools | tojson }}</tools>{% endif %}{{ messages[0].content }}"
    none = dict.fromkeys(("model_type", "tokenizer_config", "special_tokens_map", "added_tokens", "chat_template.json", "additional"))
    tokenizer = load_tokenizer(write(tmp_path / "t", {"backend": "bpe", **none, "chat_template.jinja": template}))
    assert tokenizer.apply_chat_template(MESSAGES) == MESSAGES[0]["content"]
    assert tokenizer.apply_chat_template(MESSAGES, tools=TOOLS).startswith("<tools>[{")


def test_vocab_and_merges_alone_make_a_tokenizer(tmp_path: Path) -> None:
    bpe().model.save(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>"}')
    assert_same_ids(load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path))


# ---------------------------------------------------------------------------------------------------- templates
TEMPLATES = {
    "dict": "{{ dict(a=1, **{'b': 2}) | tojson(indent=2) }}{{ dict.fromkeys(['x']) }}",
    "namespace": "{% set ns = namespace(self=1, n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "underscore": "{% set ns = namespace(_n=0) %}{{ ns }}",
    "generation scope": "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}{{ x }}|{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "json": "{{ messages | tojson(sort_keys=true, separators=(',', ':')) }}{{ 'ä<&' | tojson }}{{ 'ä' | tojson(ensure_ascii=true) }}",
    "date": "{{ strftime_now('%Y') }}{% if date_string is not defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}",
    "raise": "{{ raise_exception('no system') }}",
    "none keys": "{{ messages[2].tool_calls is defined }}{{ messages[2].keys() | list }}",
    "reasoning": "{{ messages[2].reasoning_content }}{{ messages[2].thinking }}",
    "items": "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0]['role'].upper() }}",
    "split": "{{ messages[-1]['content'].split('<')[-1] }}{{ messages[1:] | length }}{{ messages | map(attribute='role') | join(',') }}",
    "append": "{% set l = [] %}{{ l.append(1) }}{{ l }}",
    "whitespace": "  {% if true %}\n    x\n  {% endif %}\n{#- note -#}\n  y  \n",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_find_what_transformers_gives_them(name: str, tmp_path: Path) -> None:
    none = dict.fromkeys(("model_type", "tokenizer_config", "special_tokens_map", "added_tokens", "chat_template.json", "additional"))
    folder = write(tmp_path / "t", {"backend": "bpe", **none, "chat_template.jinja": TEMPLATES[name]})
    assert_same_chats(load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder))


def test_templates_without_a_default_are_named(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "tools"}]
    none = dict.fromkeys(("model_type", "special_tokens_map", "added_tokens", "chat_template.jinja", "chat_template.json", "additional"))
    tokenizer = load_tokenizer(write(tmp_path / "t", {"backend": "bpe", **none, "tokenizer_config": {"chat_template": named}}))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="it has rag, tool_use, but no default"):
        tokenizer.apply_chat_template(MESSAGES)
    assert tokenizer.apply_chat_template(MESSAGES, tools=TOOLS) == "tools"
    with pytest.raises(InvalidRequestError, match="empty"):
        tokenizer.apply_chat_template([], tools=TOOLS)


# ---------------------------------------------------------------------------------------------------- the cache
NONE = dict.fromkeys(
    ("model_type", "tokenizer_config", "special_tokens_map", "added_tokens", "chat_template.jinja", "chat_template.json", "additional")
)


def test_a_folder_that_was_read_before_needs_no_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", {"backend": "bpe with bos", **NONE, "special_tokens_map": {"eos_token": "<more>"}})
    code = (
        "import sys; from pathlib import Path; from aioengine.checkpoint.tokenizer import load_tokenizer;"
        f"t = load_tokenizer(Path({str(folder)!r})); print('transformers' in sys.modules, 'torch' in sys.modules, t.special_tokens)"
    )
    env = {"AIOENGINE_CACHE": str(tmp_path / "cache"), "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    first, second = (
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    assert first.startswith("True")
    assert second.startswith("False False")
    assert first.split("{")[1] == second.split("{")[1]


def test_a_changed_file_a_damaged_cache_and_no_cache_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(tokenizer_files, "cache_folder", lambda: cache)
    folder = write(tmp_path / "t", {"backend": "bpe", **NONE, "special_tokens_map": {"eos_token": "</s>"}})
    assert load_tokenizer(folder).special_tokens["eos_token"] == "</s>"
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<s>" }')  # as long as before
    assert load_tokenizer(folder).special_tokens["eos_token"] == "<s>"
    kept = sorted((cache / "tokenizers").iterdir())
    assert len(kept) == 2, "nothing is left of the temporary folders"
    for entry in kept:
        (entry / "tokenizer_config.json").write_text("{")
    assert load_tokenizer(folder).special_tokens["eos_token"] == "<s>"
    cache_that_is_a_file = tmp_path / "file"
    cache_that_is_a_file.touch()
    monkeypatch.setattr(tokenizer_files, "cache_folder", lambda: cache_that_is_a_file / "x")
    assert load_tokenizer(folder).special_tokens["eos_token"] == "<s>"
