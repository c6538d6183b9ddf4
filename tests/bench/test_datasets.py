"""Datasets give the requests that were asked for, to the token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aioengine.errors import ConfigError
from aioengine.testing import FakeTokenizer
from aioengine_bench.datasets import BenchRequest, load_dataset
from aioengine_bench.specs import DatasetSpec
from aioengine_bench.workloads import load_workload

TOKENIZER = FakeTokenizer()


def load(**options: Any) -> list[BenchRequest]:
    return load_dataset(DatasetSpec(**options), TOKENIZER, vocab_size=261)


def retokenized(request: BenchRequest) -> list[int]:
    return TOKENIZER.encode(TOKENIZER.decode(request.prompt_token_ids), add_special_tokens=False)


@pytest.mark.parametrize("input_len", [1, 2, 17, 300])
def test_random_prompts_have_the_exact_length_also_as_text(input_len: int) -> None:
    requests = load(name="random", num_prompts=5, input_len=input_len, output_len=3)
    assert [request.prompt_len for request in requests] == [input_len] * 5
    assert all(retokenized(request) == request.prompt_token_ids for request in requests)
    assert {request.max_tokens for request in requests} == {3}
    assert all(request.ignore_eos for request in requests)


def test_a_length_that_was_asked_for_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps([{"conversations": [{"value": "one two three"}, {"value": "four five six"}]}, {"conversations": []}]))
    assert [request.max_tokens for request in load(name="sharegpt", path=str(path), num_prompts=2, output_len=2)] == [2, 2]


@pytest.mark.model
def test_random_prompts_survive_a_real_tokenizer() -> None:
    from aioengine.checkpoint.tokenizer import load_tokenizer
    from aioengine.models.info import read_model_info, resolve_model

    files = resolve_model("smollm2", progress=False)
    tokenizer, info = load_tokenizer(files.folder), read_model_info(files)
    for spec in (
        DatasetSpec(num_prompts=4, input_len=1, output_len=1),
        DatasetSpec(num_prompts=8, input_len=200, output_len=1, range_ratio=0.5, prefix_len=33),
    ):
        for request in load_dataset(spec, tokenizer, vocab_size=info.vocab_size):
            text = tokenizer.decode(request.prompt_token_ids)
            assert tokenizer.encode(text, add_special_tokens=False) == request.prompt_token_ids


def test_lengths_vary_within_the_ratio() -> None:
    lengths = [request.prompt_len for request in load(num_prompts=200, input_len=100, output_len=10, range_ratio=0.2)]
    assert min(lengths) >= 80
    assert max(lengths) <= 120
    assert len(set(lengths)) > 20


def test_the_seed_fixes_the_requests() -> None:
    assert load(num_prompts=5, input_len=20, seed=1) == load(num_prompts=5, input_len=20, seed=1)
    assert load(num_prompts=5, input_len=20, seed=1) != load(num_prompts=5, input_len=20, seed=2)


def test_a_random_prefix_is_shared_and_comes_on_top() -> None:
    requests = load(num_prompts=4, input_len=10, prefix_len=6)
    assert {tuple(request.prompt_token_ids[:6]) for request in requests} == {tuple(requests[0].prompt_token_ids[:6])}
    assert {request.prompt_len for request in requests} == {16}
    assert len({tuple(request.prompt_token_ids) for request in requests}) == 4


def test_prefix_repetition() -> None:
    requests = load(name="prefix_repetition", num_prompts=12, prefix_len=32, input_len=8, output_len=5, num_prefixes=3)
    assert len({tuple(request.prompt_token_ids[:32]) for request in requests}) == 3
    assert {request.prompt_len for request in requests} == {40}


def test_bundled_text() -> None:
    requests = load(name="text", num_prompts=6, input_len=120, output_len=9, prefix_len=40)
    assert {request.prompt_len for request in requests} == {160}
    assert len({tuple(request.prompt_token_ids[:40]) for request in requests}) == 1
    assert " the " in TOKENIZER.decode(requests[0].prompt_token_ids)


def test_bursts_bring_their_times() -> None:
    requests = load(name="burst", num_prompts=5, burst_size=2, burst_interval=3.0, input_len=4, output_len=2)
    assert [request.arrival_time for request in requests] == [0.0, 0.0, 3.0, 3.0, 6.0]


def test_a_workload_is_taken_as_it_is() -> None:
    workload = load_workload("single")
    (request,) = load(workload="single")
    assert request == BenchRequest(workload.requests[0].prompt_token_ids, 128)


def test_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    conversations = [
        {"conversations": [{"from": "human", "value": "How are you today?"}, {"from": "gpt", "value": "Fine, thank you."}]},
        {"conversations": [{"from": "human", "value": "Only a question"}]},
        {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "Too short a question."}]},
        {"conversations": [{"from": "human", "value": "x" * 2000}, {"from": "gpt", "value": "Too long a question."}]},
    ]
    path.write_text(json.dumps(conversations))
    requests = load(name="sharegpt", path=str(path), num_prompts=3)
    assert [TOKENIZER.decode(request.prompt_token_ids) for request in requests] == ["How are you today?"] * 3
    assert {(request.max_tokens, request.ignore_eos) for request in requests} == {(16, False)}


def test_custom_lines(tmp_path: Path) -> None:
    path = tmp_path / "custom.jsonl"
    lines = [{"prompt": "abc", "output_tokens": 7}, {"prompt": [1, 2, 3]}, {"messages": [{"role": "user", "content": "Hi"}]}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    requests = load(name="custom", path=str(path), num_prompts=4)
    assert requests[0] == BenchRequest(TOKENIZER.encode("abc"), 7, ignore_eos=False)
    assert requests[1].prompt_token_ids == [1, 2, 3]
    assert TOKENIZER.decode(requests[2].prompt_token_ids, skip_special_tokens=False) == "<bos><|user|>Hi<eos><|assistant|>"
    assert requests[3] == requests[0], "a small file is gone through again"


def test_timed_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000, "input_length": 5, "output_length": 2}, {"timestamp": 3500, "input_length": 9, "output_length": 1}]
    path.write_text("\n".join(map(json.dumps, lines)))
    requests = load(name="timed_trace", path=str(path))
    assert [(r.prompt_len, r.max_tokens, r.arrival_time) for r in requests] == [(5, 2, 0.0), (9, 1, 2.5)]


def test_hash_ids_of_a_trace_say_which_blocks_are_shared(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    rows = [(0, 700, [5, 9]), (1000, 1300, [5, 9, 11]), (2000, 600, [7, 9]), (3000, 512, [5])]
    path.write_text("\n".join(f'{{"timestamp": {t}, "input_length": {n}, "output_length": 3, "hash_ids": {ids}}}' for t, n, ids in rows))
    prompts = [request.prompt_token_ids for request in load(name="timed_trace", path=str(path))]
    assert [len(prompt) for prompt in prompts] == [700, 1300, 600, 512]
    assert prompts[1][:700] == prompts[0]
    assert prompts[3] == prompts[0][:512]
    assert prompts[2][:512] != prompts[0][:512]
    assert prompts[2][512:] == prompts[0][512:600]
    assert prompts[1][1024:] != prompts[1][512:788]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("custom", '{"prompt": ""}', "line 1: needs a `prompt`"),
        ("custom", '{"prompt": "a", "output_tokens": 0}', "line 1: `output_tokens` must be a whole number above 0, got 0"),
        ("custom", '{"prompt": "a"}\nnot json', "line 2: "),
        ("custom", "[1]", "line 1: is not a JSON object"),
        ("custom", "", "has no usable request"),
        ("sharegpt", "{}", "not a JSON list"),
        ("timed_trace", '{"input_length": 1}', "`timestamp` must be a number"),
        ("timed_trace", '{"timestamp": 1, "input_length": 1}', "`output_length` must be"),
        ("timed_trace", '{"timestamp": true, "input_length": 1, "output_length": 1}', "`timestamp` must be a number"),
        ("timed_trace", '{"timestamp": 1, "input_length": true, "output_length": 1}', "`input_length` must be"),
        ("timed_trace", '{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [1.5]}', "must be a list of whole numbers"),
        ("timed_trace", '{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "513 tokens are 2 blocks of 512"),
        ("timed_trace", "", "has no usable request"),
        ("sharegpt", "[1]", "entry 0: must be an object with a list `conversations`, got 1"),
        ("sharegpt", '[{"conversations": {}}]', "entry 0: must be an object"),
        ("sharegpt", '[{"conversations": [1, 2]}]', "entry 0: the first turns must have a text `value`"),
        ("sharegpt", '[{"conversations": [{"value": 1}, {"value": "a"}]}]', "entry 0: the first turns must have a text `value`"),
        ("custom", '{"prompt": [1, true]}', "line 1: token ids must be integers from 0 to 260, got True"),
        ("custom", '{"prompt": [1, 261]}', "line 1: token ids must be integers from 0 to 260, got 261"),
        ("custom", '{"messages": [1]}', "line 1: a message needs a text `role` and `content`, got 1"),
        ("custom", '{"messages": [{"role": "user"}]}', "line 1: a message needs"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / "data"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as failure:
        load(name=name, path=str(path))
    assert str(path) in str(failure.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_prompts": 0}, "num_prompts must be at least 1, got 0"),
        ({"input_len": 0}, "input_len must be at least 1, got 0"),
        ({"range_ratio": 1.0}, "range_ratio"),
        ({"name": "sharegpt"}, "needs a file"),
        ({"workload": "none"}, "no workload 'none', only mixed"),
        ({"name": "custom", "path": "/nowhere"}, "cannot read /nowhere"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(**options)
