"""`/v1/completions`: prompts in every form, echo, log-probabilities, streams."""

from __future__ import annotations

from typing import Any

import pytest

from aioengine.testing import scripted


def texts_of(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


async def test_an_answer_has_every_field_of_openai(served: Any) -> None:
    answer = await served.complete("Hello", model="fake")
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert len(choice["text"]) == 16, "as OpenAI, 16 tokens unless more are asked for"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["total_tokens"] == 22


async def test_text_and_token_ids_and_lists_of_either_are_prompts(served: Any) -> None:
    one = (await served.complete("Hello"))["choices"][0]["text"]
    ids = (await served.post("/tokenize", {"prompt": "Hello"}))["tokens"]
    assert (await served.complete(ids))["choices"][0]["text"] == one
    for prompt in (["Hello", "World"], [ids, [257, 87, 111, 114, 108, 100]]):
        choices = (await served.complete(prompt))["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert choices[0]["text"] == one
        assert choices[1]["text"] != one
    plain = (await served.post("/tokenize", {"prompt": "Hello", "add_special_tokens": False}))["tokens"]
    answer = await served.complete("Hello", add_special_tokens=False)
    assert answer["usage"]["prompt_tokens"] == len(plain) == 5


async def test_choices_of_many_prompts_are_numbered_by_prompt(served: Any) -> None:
    fields = {"n": 2, "temperature": 1, "seed": 3, "max_tokens": 4}
    whole = (await served.complete(["a", "b"], **fields))["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2, 3]
    chunks = await served.chunks("/v1/completions", prompt=["a", "b"], **fields)
    assert texts_of(chunks) == {choice["index"]: choice["text"] for choice in whole}


async def test_a_stream_ends_with_a_reason_and_usage(served: Any) -> None:
    whole = await served.complete("Hello", max_tokens=6)
    chunks = await served.chunks("/v1/completions", prompt="Hello", max_tokens=6, stream_options={"include_usage": True})
    assert texts_of(chunks)[0] == whole["choices"][0]["text"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_echo_gives_the_prompt_and_its_logprobs(served: Any, stream: bool, max_tokens: int) -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens}
    if stream:
        chunks = [chunk for chunk in await served.chunks("/v1/completions", prompt="Hello", **fields) if chunk["choices"]]
        text = texts_of(chunks)[0]
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        logprobs = {key: [entry for part in parts for entry in part[key]] for key in parts[0]}
    else:
        answer = await served.complete("Hello", **fields)
        assert answer["usage"]["completion_tokens"] == max_tokens
        text, logprobs = answer["choices"][0]["text"], answer["choices"][0]["logprobs"]
    generated = (await served.complete("Hello", max_tokens=3))["choices"][0]["text"][:max_tokens]
    assert text == "Hello" + generated
    assert logprobs["tokens"] == ["<bos>", *"Hello", *generated]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    for token, value, top in list(zip(*(logprobs[key] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True))[1:]:
        assert top[token] == value
    assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:index])) for index in range(len(logprobs["tokens"]))]


async def test_pieces_of_characters_are_named_by_their_bytes(serve: Any) -> None:
    async with serve(scripted("é")) as served:
        logprobs = (await served.complete("x", logprobs=1))["choices"][0]["logprobs"]
        assert logprobs["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]


async def test_prompt_logprobs_come_in_vllm_s_form(served: Any) -> None:
    (choice,) = (await served.complete("Hi", prompt_logprobs=1))["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    for token_id, entry in zip((72, 105), rest, strict=True):
        assert entry[str(token_id)]["decoded_token"] == chr(token_id)
        assert entry[str(token_id)]["rank"] >= 1


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", 7]}, "prompt[1]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, 2.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["x"] * 2000}, "2000"),
        ({"prompt": [99999]}, "99999"),
        ({"prompt": [-1]}, "-1"),
        ({"prompt": ""}, "empty"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"n": 0}, "n must"),
        ({"n": 2000}, "n must"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": None, "min_tokens": 2**62}, "min_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**80}, "seed"),
        ({"priority": 2**70}, "priority"),
        ({"timeout": -1}, "timeout"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"stream": 1}, "stream"),
    ],
)
async def test_what_cannot_be_served_is_a_400_that_names_it(served: Any, fields: dict[str, Any], word: str) -> None:
    error = (await served.post("/v1/completions", {"prompt": "x", **fields}, status=400))["error"]
    assert word in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)


async def test_one_refused_prompt_refuses_them_all_and_leaves_nothing_behind(served: Any) -> None:
    await served.complete(["fine", [99999], "fine too"], max_tokens=100, status=400)


async def test_every_parameter_of_sampling_is_taken(served: Any) -> None:
    await served.complete(
        "x",
        max_tokens=4,
        top_k=5,
        min_p=0.1,
        top_p=0.9,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"65": 2},
        allowed_token_ids=[65, 66, 67],
        bad_words=["C"],
        min_tokens=1,
        ignore_eos=True,
        stop_token_ids=[3],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        truncate_prompt_tokens=1,
        repetition_detection={"max_pattern_size": 0},
        extra_args={"a": 1},
        priority=3,
        cache_salt="s",
        timeout=5.5,
        request_id="mine",
        user="u",
    )


async def test_structured_outputs_hold_the_text(served: Any) -> None:
    answer = await served.complete("x", structured_outputs={"choice": ["yes", "no"]})
    assert answer["choices"][0]["text"] in ("yes", "no")
    assert answer["choices"][0]["finish_reason"] == "stop"
