"""Any recording runs again to the same frames, and what was changed in one is found where it was changed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from aioengine.cli import main
from aioengine.errors import ConfigError
from aioengine.events.recording.reader import Recording, read_recording
from aioengine.events.step_event import StepEvent, StepResultEvent
from aioengine.events.wire import decode, decode_header, encode
from aioengine.replay.frames import FrameReport, replay_frames
from tests.replay.recordings import KINDS, make_recording

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("recordings")
    paths = {kind: folder / f"{kind}.jsonl" for kind in KINDS}
    for kind, path in paths.items():
        make_recording(kind, path)
    return paths


def replay(recording: Recording) -> FrameReport:
    return replay_frames(recording.header, recording.events)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recording_runs_again_to_the_same_frames(recordings: dict[str, Path], kind: str) -> None:
    recording = read_recording(recordings[kind])
    report = replay(recording)
    assert report.difference is None, str(report.difference)
    assert report.num_steps == report.num_results == sum(isinstance(event, StepEvent) for event in recording.events)
    calls = {call for event in recording.events if isinstance(event, (StepEvent, StepResultEvent)) for call in event.calls}
    assert calls >= {"add", "finish", "ended", "reset_running", "schedule", "update"}
    reasons = {info.finish_reason for event in recording.events for info in getattr(event, "finished", ())}
    assert reasons >= {"stop", "length", "abort", "error"}
    assert report.num_preemptions > 5
    assert report.num_steps > (600 if kind == "demo" else 100)
    if kind.startswith("guesses"):
        assert max(event.num_accepted_tokens for event in recording.events if isinstance(event, StepResultEvent)) > 0


def test_another_process_with_other_hash_seeds_agrees(recordings: dict[str, Path]) -> None:
    reports = []
    for seed in ("0", "1234"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        command = [sys.executable, str(ROOT / "tests/replay/replay_script.py"), *map(str, recordings.values())]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        reports.append([json.loads(line) for line in done.stdout.splitlines()])
    assert reports[0] == reports[1]
    assert [report[2] for report in reports[0]] == ["None"] * len(KINDS)


def test_a_recording_without_text_reveals_none(recordings: dict[str, Path]) -> None:
    content = recordings["text_free"].read_text()
    header = decode_header(content.splitlines()[0])
    assert header.config["cache"]["prefix_caching_seed"] is None, "who knew the seed could try prompts"
    assert not re.search(r'"(prompt_token_ids|sampled_token_ids|all_token_ids)":(\[\d|\{"[^"]*":\[\d)', content)
    assert "salt" not in re.sub(r'"cache_salt":null', "", content)
    assert "second turns" not in content


# ------------------------------------------------------------------ changed recordings
def _change(source: Path, target: Path, change: Callable[[list[bytes]], None]) -> Path:
    lines = source.read_bytes().splitlines(keepends=True)
    change(lines)
    target.write_bytes(b"".join(lines))
    return target


def _places(lines: list[bytes], kind: bytes) -> list[int]:
    return [index for index, line in enumerate(lines) if line.startswith(b'{"type":"%s"' % kind)]


def test_a_flipped_token_is_found_where_the_scheduler_first_sees_it(recordings: dict[str, Path], tmp_path: Path) -> None:
    """The block that it fills has another hash then, or the step's history another token, not later."""
    flipped: list[int] = []

    def flip(lines: list[bytes]) -> None:
        place = _places(lines, b"result")[60]
        event = decode(lines[place])
        assert isinstance(event, StepResultEvent)
        req_id = next(iter(event.sampled_token_ids))
        event.sampled_token_ids[req_id][0] ^= 1
        lines[place] = encode(event, include_prompts=True)
        flipped.append(event.step_id)

    report = replay(read_recording(_change(recordings["plain"], tmp_path / "flipped.jsonl", flip)))
    assert report.difference is not None
    assert flipped[0] <= report.difference.step_id <= flipped[0] + 6, str(report.difference)


def test_a_flipped_token_of_a_prompt_is_found_at_its_first_step(recordings: dict[str, Path], tmp_path: Path) -> None:
    steps: list[int] = []

    def flip(lines: list[bytes]) -> None:
        for place in _places(lines, b"step")[40:]:
            event = decode(lines[place])
            assert isinstance(event, StepEvent)
            if event.output.scheduled_new_reqs:
                event.output.scheduled_new_reqs[0].prompt_token_ids[0] ^= 1
                lines[place] = encode(event, include_prompts=True)
                steps.append(event.step_id)
                return

    report = replay(read_recording(_change(recordings["plain"], tmp_path / "flipped.jsonl", flip)))
    assert report.difference is not None
    assert (report.difference.step_id, report.difference.field) == (steps[0], "output.scheduled_new_reqs[0].prompt_token_ids[0]") or (
        report.difference.step_id == steps[0] and "scheduled_new_reqs" in report.difference.field
    )


def test_another_number_of_blocks_is_found_at_the_first_step(recordings: dict[str, Path], tmp_path: Path) -> None:
    def change(lines: list[bytes]) -> None:
        lines[0] = lines[0].replace(b'"num_kv_cache_blocks":36', b'"num_kv_cache_blocks":35')

    report = replay(read_recording(_change(recordings["plain"], tmp_path / "blocks.jsonl", change)))
    assert report.difference is not None
    assert report.difference.step_id == 1
    assert report.difference.field == "stats.num_total_blocks"
    assert (report.difference.recorded, report.difference.now) == (35, 34)


@pytest.mark.parametrize("kind", [b"step", b"result"])
def test_a_dropped_line_is_refused_by_its_number(recordings: dict[str, Path], tmp_path: Path, kind: bytes) -> None:
    def drop(lines: list[bytes]) -> None:
        del lines[_places(lines, kind)[30]]

    recording = read_recording(_change(recordings["plain"], tmp_path / "dropped.jsonl", drop))
    with pytest.raises(ConfigError, match=f"{'step' if kind == b'step' else 'result of step'} 31 is missing"):
        replay(recording)


def test_older_recordings_are_refused_by_their_schema() -> None:
    recording = read_recording(ROOT / "tests/events/data/schema_2.jsonl")
    with pytest.raises(ConfigError, match="schema 2 does not tell the calls"):
        replay(recording)


def test_the_command_says_what_it_found(recordings: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(recordings["plain"])
    assert main(["replay", path]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["replay", path, "--until", "20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_steps"], report["verified"], report["difference"]) == (20, True, None)
    assert 18 <= report["num_results"] <= 19, "two steps are in flight at most"

    def change(lines: list[bytes]) -> None:
        place = _places(lines, b"step")[16]
        lines[place] = re.sub(rb'"num_free_blocks":\d+', b'"num_free_blocks":99', lines[place])

    broken = str(_change(recordings["plain"], tmp_path / "broken.jsonl", change))
    assert main(["replay", broken]) == 1
    assert "step 17: stats.num_free_blocks: recorded 99, now " in capsys.readouterr().out
    assert main(["replay", broken, "--until", "16"]) == 0
    assert main(["replay", broken, "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["difference"]["step_id"] == 17
    text_free = str(recordings["text_free"])
    assert main(["replay", text_free, "--verify", "tokens"]) == 2
    assert "holds no token ids" in capsys.readouterr().err
