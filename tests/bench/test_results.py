"""Result files: valid JSON always, nothing overwritten by accident."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.errors import ConfigError
from aioengine_bench.results import (
    SaveOptions,
    encode_result,
    environment,
    file_name,
    parse_metadata,
    read_results,
    save_result,
    with_metadata,
)

_VALUES = st.recursive(
    st.none() | st.floats() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} in JSON")


@given(st.dictionaries(st.text(max_size=4), _VALUES, max_size=4))
def test_what_is_not_finite_never_reaches_json(result: dict[str, Any]) -> None:
    json.loads(encode_result(result), parse_constant=_refuse)


def test_infinity_becomes_null_and_the_rest_stays() -> None:
    assert json.loads(encode_result({"a": math.inf, "b": [math.nan, 1.5], "c": {"d": -math.inf, "e": "inf"}})) == {
        "a": None,
        "b": [None, 1.5],
        "c": {"d": None, "e": "inf"},
    }


def test_save_and_append(tmp_path: Path) -> None:
    options = SaveOptions(save=True, folder=str(tmp_path / "new"), filename="r.json")
    assert save_result({"a": 1}, options, default_name="d.json") == tmp_path / "new" / "r.json"
    save_result({"a": 2}, options, default_name="d.json")
    assert read_results(tmp_path / "new" / "r.json") == [{"a": 2}]
    append = SaveOptions(append=True, folder=str(tmp_path / "new"), filename="r.json")
    save_result({"a": 3}, append, default_name="d.json")
    assert read_results(tmp_path / "new" / "r.json") == [{"a": 2}, {"a": 3}]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["r.json"], "no partial file is left"


def test_append_mends_a_file_without_a_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"a":1}')
    save_result({"a": 2}, SaveOptions(append=True, folder=str(tmp_path), filename="r.json"), default_name="")
    assert read_results(path) == [{"a": 1}, {"a": 2}]


def test_output_json_to_stdout_and_file(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert save_result({"a": 1}, SaveOptions(output_json="-"), default_name="d.json") is None
    assert json.loads(capsysbinary.readouterr().out) == {"a": 1}
    save_result({"a": 1}, SaveOptions(output_json=str(tmp_path / "o.json")), default_name="d.json")
    assert read_results(tmp_path / "o.json") == [{"a": 1}]


def test_metadata() -> None:
    assert parse_metadata(["gpu=none", "note=a=b"]) == {"gpu": "none", "note": "a=b"}
    with pytest.raises(ConfigError, match="KEY=VALUE, got 'gpu'"):
        parse_metadata(["gpu"])
    assert with_metadata({"a": 1}, {"b": "2"}) == {"a": 1, "b": "2"}
    with pytest.raises(ConfigError, match="own keys: a"):
        with_metadata({"a": 1}, {"a": "2"})


def test_a_file_name_stays_in_its_folder() -> None:
    assert (
        file_name(["aioengine", "2qps", "", "../../org/model"], "20260101-000000") == "aioengine-2qps-.._.._org_model-20260101-000000.json"
    )


def test_the_environment_names_machine_and_versions() -> None:
    facts = environment()
    assert facts["cpu"]
    assert facts["torch"]
    json.loads(encode_result(facts))


@pytest.mark.parametrize("content", ["", "[]", "nothing", '{"a":1}\n{'])
def test_what_holds_no_results_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"r\.json"):
        read_results(path)
