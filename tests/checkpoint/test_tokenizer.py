"""Encoding, decoding and chat templates, against transformers on the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import processors

from aioengine.checkpoint.tokenizer import load_tokenizer
from aioengine.errors import InvalidRequestError, ModelError
from tests.tiny_tokenizer import byte_level_tokenizer

TEMPLATES = {
    "chatml": "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}",
    "bos": "{{ bos_token }}{% for m in messages %}\n    {%- if m.role == 'user' %}[U]{{ m.content }}{% endif %}"
    "\n{%- endfor %}{{ eos_token }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
    "whitespace": "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}
MESSAGES = [
    {"role": "system", "content": " Be <brief> & 'kind'. "},
    {"role": "user", "content": "Grüße, 世界!"},
    {"role": "assistant", "content": "Hi"},
]


def write_tokenizer(folder: Path, *, template: Any = None) -> Path:
    """A byte-level tokenizer that puts <s> before a text, as Llama 3's does."""
    backend = byte_level_tokenizer(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    backend.enable_truncation(5)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_text_survives_the_round_trip_whatever_the_file_says_about_length(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    text = "Grüße, 世界! " * 3
    ids = tokenizer.encode(text)
    assert ids[0] == 0
    assert len(ids) == 1 + len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text
    assert tokenizer.vocab_size == 258
    assert tokenizer.special_token_ids == {0, 1}


def test_a_rendered_chat_gets_no_second_bos(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=TEMPLATES["bos"]))
    ids = tokenizer.encode(tokenizer.apply_chat_template(MESSAGES), add_special_tokens=False)
    assert ids[0] == 0
    assert ids.count(0) == 1
    assert ids[-1] == 1


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_templates_render_as_transformers_renders_them(name: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template=TEMPLATES[name])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    for add in (True, False):
        expected = theirs.apply_chat_template(MESSAGES, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=add)
        assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES, add_generation_prompt=add) == expected


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    assert not load_tokenizer(write_tokenizer(tmp_path)).has_chat_template
    write_tokenizer(tmp_path, template=[{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}])
    assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES) == "file"


def test_refused_messages_are_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        load_tokenizer(write_tokenizer(tmp_path)).apply_chat_template(MESSAGES)
    write_tokenizer(tmp_path, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        load_tokenizer(tmp_path).apply_chat_template(MESSAGES)
    write_tokenizer(tmp_path, template="{{ messages[0]['content']['text'] + 1 }}")
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        load_tokenizer(tmp_path).apply_chat_template(MESSAGES)


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        load_tokenizer(tmp_path).apply_chat_template(MESSAGES)


def test_a_broken_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read the tokenizer") as failure:
        load_tokenizer(tmp_path)
    assert len(str(failure.value).splitlines()) == 1
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(ModelError, match=f"cannot read the tokenizer in {tmp_path}: it has neither a tokenizer.json nor another file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"no protobuf")
    with pytest.raises(ModelError, match="cannot read the tokenizer") as failure:
        load_tokenizer(tmp_path)
    assert len(str(failure.value).splitlines()) == 1


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ 10 ** 400 / 3.5 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for m in messages %}{% if %}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_whatever_a_template_does_is_an_error_of_the_request(template: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=template))
    with pytest.raises(InvalidRequestError, match="the chat template refuses these messages"):
        tokenizer.apply_chat_template(MESSAGES)
