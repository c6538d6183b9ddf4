"""What the viewer says about draft tokens: nothing where none are made, else how many were right."""

from __future__ import annotations

from aioengine import AsyncEngine, SamplingParams
from aioengine.testing import FakeExecutor, FakeTokenizer, scripted
from aioengine_tui.model.state import DashboardState
from aioengine_tui.screens.overview import overview_lines
from aioengine_tui.screens.step import frame_lines
from aioengine_tui.widgets.step_rows import StepRow
from aioengine_tui.widgets.text import line_text, percent


async def state_after_a_refrain(num_draft_tokens: int) -> DashboardState:
    state = DashboardState()
    executor = FakeExecutor(next_token=scripted("la la la li " * 8))
    async with AsyncEngine(executor=executor, tokenizer=FakeTokenizer(), num_speculative_tokens=num_draft_tokens) as engine:
        state.apply(engine.wire_header)
        engine.bus.add_observer(state.apply)
        await engine.generate_batch(["sing"], SamplingParams(temperature=0, max_tokens=90), progress=False)
        assert state.stats is not None
        assert all(row.num_computed_tokens <= row.num_tokens for row in [*state.requests.values(), *state.finished.values()])
    return state


def text_of(state: DashboardState) -> str:
    return "\n".join(line_text(line) for line in overview_lines(state, 120, 40))


async def test_the_overview_and_the_steps_show_how_many_were_right() -> None:
    state = await state_after_a_refrain(4)
    assert state.stats is not None
    rate, total = state.stats.acceptance_rate, state.stats.num_draft_tokens
    assert rate is not None
    assert 0 < rate < 1
    assert f"draft tokens accepted {percent(rate)} of {total}" in " ".join(text_of(state).split())
    drafted = [step for step in state.steps if step.num_draft_tokens]
    assert sum(step.num_draft_tokens for step in drafted) == total
    head = line_text(frame_lines(StepRow(drafted[0], None), 120)[0])
    assert f"{drafted[0].num_accepted_tokens} of {drafted[0].num_draft_tokens} draft tokens accepted" in head


async def test_without_draft_tokens_nothing_is_said() -> None:
    state = await state_after_a_refrain(0)
    assert "draft token" not in text_of(state)
    assert not any("draft token" in line_text(frame_lines(StepRow(step, None), 120)[0]) for step in state.steps)
