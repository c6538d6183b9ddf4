"""Custom logits processors: what they are told, where in the order they come, and what a wrong one says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from aioengine.errors import ConfigError
from aioengine.resolved_config import ResolvedConfig
from aioengine.sampling_params import SamplingParams
from aioengine.worker.sample.logits_processor import ProcessorRow, load_logits_processors

PROMPT = [3, 14, 15, 9, 26]
MakeDriver = Callable[..., Any]
HERE = "aioengine_test_processors"


class Recorder:
    """Sends everyone to the token that `extra_args` names, and remembers what it was told."""

    argmax_invariant = False

    def __init__(self, config: ResolvedConfig) -> None:
        self.vocab_size = config.model.vocab_size
        self.calls: list[list[tuple[str, SamplingParams, list[int], list[int]]]] = []
        self.made.append(self)

    made: list[Recorder]

    def is_argmax_invariant(self) -> bool:
        return self.argmax_invariant

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor:
        assert logits.shape == (len(rows), self.vocab_size)
        assert logits.dtype == torch.float32
        self.calls.append([(r.req_id, r.sampling_params, r.prompt_token_ids.tolist(), r.output_token_ids.tolist()) for r in rows])
        with pytest.raises(ValueError, match="read-only"):
            rows[0].prompt_token_ids[0] = 1
        wanted = [row.sampling_params.extra_args.get("token") for row in rows]
        biased = logits.clone()
        for place, token in enumerate(wanted):
            if token is not None:
                biased[place, token] += 1e4
        return biased


class InvariantRecorder(Recorder):
    argmax_invariant = True


class Raising(Recorder):
    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor:
        raise KeyError("a bug of the user's")


class Shrinking(Recorder):
    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor:
        return logits[:, :3]


class WithoutApply:
    def __init__(self, config: ResolvedConfig) -> None: ...

    def is_argmax_invariant(self) -> bool:
        return True


class Unbuildable(Recorder):
    def __init__(self, config: ResolvedConfig) -> None:
        raise OSError("no such word list")


@pytest.fixture
def pipeline() -> str:
    """Processors run on the host's pipeline only."""
    return "host"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Test modules have no import name of their own: this gives the classes one. Returns the processors that get made."""
    import sys
    import types

    module = types.ModuleType(HERE)
    for found in (Recorder, InvariantRecorder, Raising, Shrinking, WithoutApply, Unbuildable):
        setattr(module, found.__name__, found)
    setattr(module, "a_number", 3)  # noqa: B010
    monkeypatch.setitem(sys.modules, HERE, module)
    made: list[Recorder] = []
    monkeypatch.setattr(Recorder, "made", made, raising=False)
    return made


def names(*classes: str) -> tuple[str, ...]:
    return tuple(f"{HERE}:{name}" for name in classes)


def test_a_processor_sees_each_request_with_its_tokens_and_changes_what_is_sampled(
    make_driver: MakeDriver, importable: list[Recorder]
) -> None:
    driver = make_driver(logits_processors=names("Recorder"))
    driver.add("a", PROMPT, extra_args={"token": 17})
    driver.add("b", PROMPT[:2], temperature=1.0, seed=3)
    driver.step({"a": 5, "b": 1})  # only a samples
    driver.step({"a": 1, "b": 1})
    driver.step({"b": 1, "a": 1})
    assert driver.outputs["a"] == [17] * 3
    (recorder,) = importable
    told = [[(req_id, prompt, output) for req_id, _, prompt, output in call] for call in recorder.calls]
    b = driver.outputs["b"]
    assert told == [
        [("a", PROMPT, [])],
        [("a", PROMPT, [17]), ("b", PROMPT[:2], [])],
        [("b", PROMPT[:2], b[:1]), ("a", PROMPT, [17, 17])],
    ]
    assert recorder.calls[0][0][1] is driver.params["a"]

    plain = make_driver()
    plain.add("b", PROMPT[:2], temperature=1.0, seed=3)
    assert plain.generate("b", 2) == b


def test_an_argmax_invariant_processor_is_not_asked_about_greedy_rows(make_driver: MakeDriver, importable: list[Recorder]) -> None:
    driver = make_driver(logits_processors=names("InvariantRecorder"))
    driver.add("greedy", PROMPT, extra_args={"token": 17})
    driver.add("random", PROMPT, temperature=1.0, top_k=1, extra_args={"token": 17})
    driver.step({"greedy": 5, "random": 5})
    assert driver.outputs["greedy"] != [17]
    assert driver.outputs["random"] == [17]
    assert [[row[0] for row in call] for call in importable[0].calls] == [["random"]]


def test_what_a_processor_does_is_in_the_processed_logprobs_only(make_driver: MakeDriver) -> None:
    for mode, is_changed in (("raw_logits", False), ("processed_logits", True)):
        driver = make_driver(logits_processors=names("Recorder"), logprobs_mode=mode)
        driver.add("a", PROMPT, logprobs=0, extra_args={"token": 17})
        driver.step({"a": 5})
        assert (driver.logprobs["a"][0][17].logprob > 1e3) == is_changed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raising", f'the logits processor {HERE}:Raising failed: KeyError: "a bug of the user\'s"'),
        ("Shrinking", rf"the logits processor {HERE}:Shrinking must return torch.float32 logits of shape \[1, 61\], .*\[1, 3\]"),
    ],
)
def test_a_failing_processor_fails_its_requests_by_name(make_driver: MakeDriver, name: str, message: str) -> None:
    driver = make_driver(logits_processors=names(name))
    driver.add("a", PROMPT)
    output = driver.step({"a": 5})
    assert re.search(message, output.failed_req_ids["a"])
    assert output.sampled_token_ids == [[]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no colon", "must hold \"module:name\" strings, got 'no colon'"),
        (":name", "got ':name'"),
        ("aioengine_no_such_module:X", "'aioengine_no_such_module:X' cannot be imported: No module named"),
        (f"{HERE}:Nowhere", f"'{HERE}:Nowhere' cannot be imported: .*Nowhere"),
        (f"{HERE}:a_number", "is a int, not a class"),
        (f"{HERE}:WithoutApply", r"needs the methods apply\(logits, rows\)"),
        (f"{HERE}:Unbuildable", "cannot be built: OSError: no such word list"),
    ],
)
def test_what_is_no_processor_is_refused_by_name(make_config: Callable[..., ResolvedConfig], name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_logits_processors(make_config(logits_processors=(name,)))


def test_a_gpu_refuses_processors(make_config: Callable[..., ResolvedConfig]) -> None:
    from aioengine.kv_cache_groups import KVCacheGroup
    from aioengine.worker.block_table import BlockTables
    from aioengine.worker.device import InterpreterDevice
    from aioengine.worker.pipeline.create import create_pipeline
    from aioengine.worker.request_state import RequestStates

    states = RequestStates(max_num_reqs=1, max_model_len=8, vocab_size=9, eos_token_ids=frozenset())
    table = BlockTables([KVCacheGroup((0,))], max_num_reqs=1, max_model_len=8, block_size=4)
    with pytest.raises(ConfigError, match="run on the CPU only"):
        create_pipeline(
            InterpreterDevice(num_threads=None), make_config(logits_processors=names("Recorder")), states=states, block_tables=table
        )
