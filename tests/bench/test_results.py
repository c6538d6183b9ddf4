"""Result files: valid JSON always, nothing overwritten by accident."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.errors import ConfigError
from aioengine_bench.report import make_page, read_input
from aioengine_bench.results import (
    check_metadata,
    check_saving,
    encode_result,
    environment,
    file_name,
    read_results,
    save_result,
    with_metadata,
    without_secrets,
)
from aioengine_bench.specs import SaveOptions, parse_metadata

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


ODD_VALUES: dict[str, Any] = {
    "half of a pair": "\ud800",
    "a huge number": 10**400,
    "a path": Path("x"),
    "a key that is none": {1: {"\ud800": 2}},
    "a set": {3, 1, 2},
}


@pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES.keys())
def test_no_value_keeps_a_result_from_being_written(value: Any) -> None:
    json.loads(encode_result({"text": value, "texts": [value]}), parse_constant=_refuse)


def test_a_link_is_followed_and_a_device_written_through(tmp_path: Path) -> None:
    target, link = tmp_path / "real" / "r.json", tmp_path / "link.json"
    target.parent.mkdir()
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    save_result({"a": 1}, SaveOptions(output_json=str(link)), default_name="")
    assert link.is_symlink()
    assert read_results(target) == [{"a": 1}]
    assert target.stat().st_mode & 0o777 == 0o640
    save_result({"a": 1}, SaveOptions(output_json="/dev/null"), default_name="")
    assert Path("/dev/null").is_char_device()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    save_result({"a": 2}, SaveOptions(output_json=str(pipe)), default_name="")
    assert json.loads(os.read(reader, 100)) == {"a": 2}
    os.close(reader)
    assert pipe.is_fifo()


def test_a_dangling_link_gets_its_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "new" / "r.json")
    (tmp_path / "new").mkdir()
    save_result({"a": 1}, SaveOptions(output_json=str(tmp_path / "link")), default_name="")
    assert read_results(tmp_path / "new" / "r.json") == [{"a": 1}]


def test_stdout_as_a_device_keeps_what_was_printed(tmp_path: Path) -> None:
    code = (
        "from aioengine_bench.results import *\nimport sys\nprint('text', flush=True)\n"
        "save_result({'a': 1}, SaveOptions(output_json='/dev/stdout'), default_name='')"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == 'text\n{"a":1}\n'


def test_results_of_one_second_are_files_of_their_own(tmp_path: Path) -> None:
    options = SaveOptions(save=True, folder=str(tmp_path))
    paths = [save_result({"a": index}, options, default_name="r.json") for index in range(3)]
    assert [path.name for path in paths if path] == ["r.json", "r-2.json", "r-3.json"]
    assert [read_results(path) for path in paths if path] == [[{"a": index}] for index in range(3)]


def test_a_measurement_whose_file_cannot_be_written_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="what was to be written is in") as caught:
        save_result({"a": 1}, SaveOptions(output_json=str(tmp_path / "file" / "r.json")), default_name="")
    assert read_results(str(caught.value).rsplit(" ", 1)[1]) == [{"a": 1}]


@pytest.mark.parametrize("name", ["folder", "file/r.json", "nul\0"])
def test_what_cannot_be_written_is_refused_before_the_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for options in (SaveOptions(output_json=str(tmp_path / name)), SaveOptions(folder=str(tmp_path), filename=name)):
        with pytest.raises(ConfigError, match="cannot write"):
            check_saving(options, ["a"], default_name="d.json")


def test_options_that_only_change_a_result_need_one() -> None:
    for options in (SaveOptions(detailed=True), SaveOptions(metadata={"b": "1"}), SaveOptions(label="mine")):
        with pytest.raises(ConfigError, match="none is written"):
            check_saving(options, ["a"], default_name="d.json")
    assert SaveOptions(filename="r.json").saves
    assert SaveOptions(folder="results").saves


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "serve", "--events-token", "S3CRET", "--seed", "1"],
        ["bench", "serve", "--events-token=S3CRET", "--seed", "1"],
        ["serve", "--api-key", "S3CRET", "--api-key-file", "S3CRET"],
        ["--password=S3CRET", "x"],
        ["bench", "serve", "--something", "S3CRET"],
    ],
)
def test_no_secret_is_in_a_result(arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["aioengine", *arguments])
    monkeypatch.setenv("AIOENGINE_EVENTS_TOKEN", "S3CRET")
    path = tmp_path / "r.json"
    save_result({"benchmark": "serve", "environment": environment()}, SaveOptions(output_json=str(path)), default_name="")
    assert "S3CRET" not in path.read_text()
    assert "S3CRET" not in make_page([read_input(str(path))], title="t")


def test_a_command_without_secrets_is_shown_as_it_was() -> None:
    command = ["bench", "serve", "--max-num-batched-tokens", "64", "--num-prompts=3"]
    assert without_secrets(command) == command


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
        check_metadata(["a", "b"], {"a": "2"})
    assert with_metadata({"a": 1}, {"a": "2"}) == {"a": 1}, "and a figure is not overwritten even so"


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
