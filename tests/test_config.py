"""`EngineConfig` takes what it can mean something by, as plain values, and refuses the rest in a line."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aioengine.checks.values import shorten
from aioengine.cli import main
from aioengine.config import SETTINGS, EngineConfig
from aioengine.errors import ConfigError
from aioengine.testing import make_model_info
from tests import door

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_num_seqs": 10**400}, "max_num_seqs must be an integer <= 65536, got an integer of 1329 bits"),
    ({"max_num_seqs": "8"}, "max_num_seqs must be an integer >= 1, got '8'"),
    ({"seed": 2**64}, "seed must be an integer <= 18446744073709551615, got 18446744073709551616"),
    ({"block_size": float("nan")}, "block_size must be an integer >= 1, got nan"),
    ({"step_timeout_s": 10**400}, "step_timeout_s must be > 0 and finite, or None, got an integer of 1329 bits"),
    ({"step_timeout_s": float("nan")}, "step_timeout_s must be > 0 and finite, or None, got nan"),
    ({"step_timeout_s": "1"}, "step_timeout_s must be > 0 and finite, or None, got '1'"),
    ({"gpu_memory_utilization": 10**400}, "gpu_memory_utilization must be in (0, 0.97], got an integer of 1329 bits"),
    ({"gpu_memory_utilization": "all"}, "gpu_memory_utilization must be in (0, 0.97], got 'all'"),
    ({"enforce_eager": "no"}, "enforce_eager must be True or False, got 'no'"),
    ({"check_invariants": 1}, "check_invariants must be True or False, got 1"),
    ({"model": 5}, "model must be a non-empty string, got 5"),
    ({"model": "a\0b"}, "model must be valid Unicode without NUL, got 'a\\x00b'"),
    ({"prefix_caching_seed": "\ud800"}, "prefix_caching_seed must be valid Unicode without NUL"),
    ({"dtype": ["float32"]}, "dtype must be one of auto, float32, bfloat16, float16, got ['float32']"),
    ({"logits_processors": "module:name"}, "logits_processors must be a list of at most 64"),
    ({"logits_processors": [5]}, "logits_processors must be a non-empty string, got 5"),
    ({"cpu_affinity": "0,3-1"}, "cpu_affinity must be different cores from 0 to 1023, a list or a text such as 0-3,8, got '0,3-1'"),
    ({"cpu_affinity": "0-99999"}, "cpu_affinity must be different cores from 0 to 1023"),
    ({"cpu_affinity": ""}, "cpu_affinity must be different cores from 0 to 1023"),
    ({"cpu_affinity": []}, "cpu_affinity must be different cores from 0 to 1023"),
    ({"cpu_affinity": [0, 0]}, "cpu_affinity must be different cores from 0 to 1023"),
    ({"cpu_affinity": [1024]}, "cpu_affinity must be different cores from 0 to 1023"),
    ({"cpu_affinity": 3}, "cpu_affinity must be different cores from 0 to 1023"),
    ({"prompt_lookup_min": 5}, "prompt_lookup_max must be an integer >= 5 (prompt_lookup_min), got 4"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: shorten(value)[:40])
def test_a_wrong_setting_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        EngineConfig.from_options(options.get("model", "smollm2"), {name: value for name, value in options.items() if name != "model"})
    with pytest.raises(ConfigError):
        dataclasses.replace(EngineConfig(), **options)


@settings(max_examples=200, deadline=None)
@example(name="loras", value={1: 1.0})
@example(name="loras", value={"x" * 300: "folder"})
@example(name="loras", value=["a=b", "a=c"])
@example(name="cpu_affinity", value=[-1])
@example(name="kv_cache_dir", value=5)
@given(name=st.sampled_from([f.name for f in dataclasses.fields(EngineConfig)]), value=door.extremes)
def test_every_setting_is_refused_by_its_name_or_resolved(name: str, value: Any) -> None:
    try:
        config = EngineConfig(**{name: value})
    except ConfigError as exc:
        door.check_message(exc, [name])
        return
    try:
        config.resolve(make_model_info(), cuda_available=False, free_memory_bytes=1 << 30)
    except ConfigError as exc:
        door.check_length(exc)


def test_numbers_of_numpy_and_paths_are_plain_values() -> None:
    given: dict[str, Any] = {"max_num_seqs": np.int64(3), "step_timeout_s": np.float32(2), "enforce_eager": np.bool_(True)}
    config = EngineConfig(model=Path("a/b"), **given)  # type: ignore[arg-type]
    assert config.model == str(Path("a/b"))
    assert [type(getattr(config, name)) for name in given] == [int, float, bool]


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False), ("yes", None)])
def test_the_environment_is_checked_too(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool | None) -> None:
    monkeypatch.setenv("AIOENGINE_CHECK", value)

    def resolve() -> bool:
        return EngineConfig().resolve(make_model_info(), cuda_available=False, free_memory_bytes=1 << 30).check_invariants

    if expected is None:
        with pytest.raises(ConfigError, match="AIOENGINE_CHECK must be 1 or 0, got 'yes'"):
            resolve()
    else:
        assert resolve() is expected


def test_the_docstring_and_the_command_line_say_the_same_of_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert [item.name for item in SETTINGS] == [field.name for field in dataclasses.fields(EngineConfig)]
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    documented = " ".join((EngineConfig.__doc__ or "").split())
    for item in SETTINGS:
        text = " ".join(item.statement.text.split())
        unset = item.default if item.statement.unset is None else item.statement.unset
        assert f"{item.name}: {text} (default: {unset})" in documented
        assert text in shown
        assert f"(default: {unset})" in shown


def test_choices_come_from_the_type() -> None:
    choices = {item.name: item.choices for item in SETTINGS if item.choices}
    assert choices["scheduling_policy"] == ("fcfs", "priority", "sjf")
    assert choices["max_model_len"] == ("auto",), "a word beside the numbers"
    for name, words in choices.items():
        for word in words:
            assert getattr(EngineConfig.from_options("smollm2", {name: word}), name) == word
