"""A recording is run again from the dashboard: the mark, the jump to the first difference, and advice that was simulated."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from aioengine.cli import main
from aioengine.commands.hindsight import RecordingHindsight
from aioengine.errors import AioEngineError
from aioengine.events.sources.open import open_source
from aioengine.resolved_config import CacheConfig, SchedulerConfig
from aioengine_bench.simulate.arrivals import Arrival
from aioengine_bench.simulate.cost import HostCost, LinearCost
from aioengine_bench.simulate.plan import Plan
from aioengine_bench.simulate.run import DetailedRecorder, SimulatedRun
from aioengine_bench.simulate.run_plan import run_plan
from aioengine_tui.app import DashboardApp
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.why.hindsight import KnownInHindsight, Verification, WhatIf, what_if_words
from tests.replay.recordings import make_recording
from tests.tui.test_app import press, settle, text_of
from tests.waiting import until


class Oracle:
    """Says what it is told to say, when it is told to."""

    def __init__(self, verification: Verification, *, fails: str = "") -> None:
        self.verification, self.fails = verification, fails
        self.asked: list[object] = []
        self.answers = asyncio.Event()

    async def verify(self) -> Verification:
        self.asked.append("verify")
        await self.answers.wait()
        if self.fails:
            raise AioEngineError(self.fails)
        return self.verification

    async def what_if(self, setting: str, *, present: int, proposed: int) -> WhatIf:
        self.asked.append((setting, present, proposed))
        await self.answers.wait()
        if self.fails:
            raise AioEngineError(self.fails)
        return WhatIf(num_preemptions=(12, 0), ttft_p95=(2.4, 0.8), output_throughput=(100.0, 150.0))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "run.jsonl"
    make_recording("plain", path)
    return path


@pytest.fixture(scope="module")
def changed(recording: Path) -> Path:
    """A frame that the scheduler would not have made."""
    path = recording.with_name("changed.jsonl")
    lines = recording.read_bytes().splitlines(keepends=True)
    place = [index for index, line in enumerate(lines) if line.startswith(b'{"type":"step"')][40]
    lines[place] = re.sub(rb'"num_free_blocks":\d+', b'"num_free_blocks":99', lines[place])
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize("width", [120, 60])
async def test_a_verified_recording_says_so(recording: Path, width: int) -> None:
    oracle = Oracle(Verification("verified", 162))
    app = DashboardApp(open_source(str(recording), make_state=DashboardState), hindsight=oracle, verify=True)
    async with app.run_test(size=(width, 40)) as pilot:
        await until(lambda: bool(oracle.asked))
        await settle(app, pilot)
        assert ("verifying" if width > 70 else " ? ") in text_of(app, "#replay")
        oracle.answers.set()
        await until(lambda: app.session.hindsight.verification.state == "verified")
        await settle(app, pilot)
        assert (" VERIFIED " if width > 70 else " OK ") in text_of(app, "#replay")
        await press(app, pilot, "V")
        assert "162 steps run again to the same frames" in text_of(app, "#warnings")[:width]
        assert oracle.asked == ["verify"], "once is enough"


async def test_a_difference_is_gone_to(recording: Path) -> None:
    oracle = Oracle(Verification("different", 40, "step 41: stats.num_free_blocks: recorded 99, now 12", 41))
    oracle.answers.set()
    app = DashboardApp(open_source(str(recording), make_state=DashboardState), hindsight=oracle)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(app, pilot)
        assert "DIFFERS" not in text_of(app, "#replay"), "nobody has asked"
        await press(app, pilot, "space", "V")
        await until(lambda: app.session.hindsight.verification.state == "different")
        await settle(app, pilot)
        assert " DIFFERS at 41 (V) " in text_of(app, "#replay")
        await press(app, pilot, "V")
        assert app.session.state.last_step_id == 41
        assert "recorded 99, now 12" in text_of(app, "#warnings")


async def test_what_cannot_be_run_again_says_why(recording: Path) -> None:
    oracle = Oracle(Verification(), fails="step 12 is missing")
    oracle.answers.set()
    app = DashboardApp(open_source(str(recording), make_state=DashboardState), hindsight=oracle, verify=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: app.session.hindsight.verification.state == "refused")
        await settle(app, pilot)
        assert " not verifiable " in text_of(app, "#replay")
        assert "step 12 is missing" in text_of(app, "#warnings")


async def test_advice_is_simulated_and_shown_with_it(recording: Path) -> None:
    oracle = Oracle(Verification())
    app = DashboardApp(open_source(str(recording), make_state=DashboardState), hindsight=oracle)
    async with app.run_test(size=(200, 50)) as pilot:
        await press(app, pilot, "1", "space")
        playback = app.source.playback
        assert playback is not None
        await playback.seek_fraction(1.0)
        await settle(app, pilot)
        await press(app, pilot, "W")
        await until(lambda: bool(oracle.asked))
        (asked,) = oracle.asked
        assert isinstance(asked, tuple)
        setting, present, proposed = asked
        assert proposed != present
        assert f"simulating {setting}={proposed} ..." in " ".join(app.view.text.split())
        oracle.answers.set()
        wanted = f"simulated with {setting}={proposed}: 0 preemptions instead of 12, TTFT p95 800 ms instead of 2.4 s"
        await until(lambda: any(wanted in said for said in app.session.hindsight.sentences.values()))
        await settle(app, pilot)
        assert wanted in " ".join(app.view.text.split())
        await press(app, pilot, "W")
        assert len(oracle.asked) == 1, "what is known is not asked again"


def test_what_if_is_said_in_one_sentence() -> None:
    nothing = WhatIf(num_preemptions=(0, 0), ttft_p95=(None, None), output_throughput=(None, None))
    assert what_if_words("max_num_seqs", proposed=8, found=nothing) == "simulated with max_num_seqs=8: no request ends"


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SimulatedRun]:
    """A run with too few blocks whose steps cost exactly what the model of costs can say."""
    path = tmp_path_factory.mktemp("crowded") / "run.jsonl"
    scheduler = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256, max_model_len=1024)
    cost = LinearCost((0.01, 1e-5, 1e-4, 0.0, 0.0, 0.0))
    plan = Plan(scheduler, CacheConfig(16), 60, cost, HostCost(0.0005, 0.0001, 0.0005))
    arrivals = [Arrival(index, index * 0.05, 40 + index % 7 * 10, 60 + index % 11) for index in range(40)]
    run, _ = run_plan(plan, arrivals, DetailedRecorder(), record=str(path))
    assert run.num_preemptions > 5
    return path, run


@pytest.fixture(scope="module")
def part(recording: Path) -> Path:
    path = recording.with_name("part.jsonl")
    path.write_bytes(b"".join(line for index, line in enumerate(recording.read_bytes().splitlines(keepends=True)) if index != 30))
    return path


async def test_the_commands_own_hindsight_verifies_and_simulates(
    recording: Path, changed: Path, part: Path, crowded: tuple[Path, SimulatedRun]
) -> None:
    found = await RecordingHindsight(recording).verify()
    assert (found.state, found.step_id) == ("verified", None)
    assert found.num_steps > 100
    found = await RecordingHindsight(changed).verify()
    assert (found.state, found.step_id) == ("different", 41)
    assert found.words.startswith("step 41: stats.num_free_blocks: recorded 99, now ")
    simulated = await RecordingHindsight(crowded[0]).what_if("num_kv_cache_blocks", present=60, proposed=400)
    before, after = simulated.num_preemptions
    assert (before, after) == (crowded[1].num_preemptions, 0)
    assert simulated.ttft_p95[0] is not None
    assert simulated.ttft_p95[1] is not None
    assert 0 < simulated.ttft_p95[1] < simulated.ttft_p95[0]
    with pytest.raises(AioEngineError, match="is missing"):
        await RecordingHindsight(part).verify()


def test_a_sentence_stays_while_the_proposal_moves_on() -> None:
    known = KnownInHindsight()
    assert known.of("max_num_seqs", 8) == ""
    known.note("max_num_seqs", 8, "eight")
    known.note("max_num_seqs", 9, "nine")
    known.note("num_kv_cache_blocks", 10, "ten")
    assert [known.of("max_num_seqs", value) for value in (8, 9, 12, None)] == ["eight", "nine", "nine", "nine"]


def test_top_prints_what_came_of_it(recording: Path, changed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(recording), "--once", "--verify"]) == 0
    assert "verified: " in capsys.readouterr().out.splitlines()[-1]
    assert main(["top", str(changed), "--once", "--verify"]) == 0
    assert "DIFFERS: step 41: stats.num_free_blocks: recorded 99" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["top", "--demo", "--verify"])
    assert "--verify: needs one recording" in capsys.readouterr().err
