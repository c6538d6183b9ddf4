"""The frame inspector: what one step sent, and what the worker makes of it."""

from __future__ import annotations

import pytest

from aioengine.testing import in_virtual_time
from aioengine_tui.screens.frame import FrameView
from aioengine_tui.screens.frame_fields import sent_fields, worker_fields
from aioengine_tui.widgets.text import Part, line_text, lines_text, wrap_line
from tests.tui.support import HEADER, ListSource, MadeUpEngine, busy_items, busy_state, folded
from tests.tui.test_app import press, running


def fields_of_step(step_id: int) -> dict[str, str]:
    state = busy_state()
    step = state.step(step_id)
    assert step is not None
    return {
        field.label: line_text(field.summary) + "\n" + lines_text(field.details)
        for field in (*sent_fields(step, state), *worker_fields(step, state))
    }


def test_every_field_of_a_step_is_told_by_its_name() -> None:
    """Step 24 of the made-up engine: one is admitted, one resumes, two decode, one has been aborted."""
    fields = fields_of_step(24)
    assert list(fields)[:10] == [
        "step_id",
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "finished_req_ids",
        "preempted_req_ids",
        "structured_output_request_ids",
        "new_block_ids_to_zero",
    ]
    assert fields["scheduled_new_reqs"].startswith("1\nzeta")
    assert "prompt_token_ids 30 tokens" in fields["scheduled_new_reqs"]
    assert fields["scheduled_cached_reqs"].startswith("3   1 resumed")
    lines = fields["scheduled_cached_reqs"].splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["alpha", "beta", "epsilon"]
    assert "num_computed_tokens 42  num_output_tokens 23" in lines[0]
    assert "new_block_ids REPLACED" in lines[2]
    assert fields["num_scheduled_tokens"].replace("\N{NO-BREAK SPACE}", " ") == "4\nalpha 1d  beta 1d  epsilon 13r  zeta 17c"
    assert fields["total_num_scheduled_tokens"].startswith("32 of 32")
    assert fields["finished_req_ids"] == "1\ngamma"
    assert fields["preempted_req_ids"].startswith("0")


def test_the_workers_half_says_who_goes_who_comes_and_where_tokens_lie() -> None:
    fields = fields_of_step(24)
    effects = [line.split()[:3] for line in fields["_update_states"].splitlines()[1:]]
    assert effects[0] == ["-", "forget", "gamma"]
    assert ["+", "add", "zeta"] in effects
    assert ["~", "resume", "epsilon"] in effects
    assert fields["query_start_loc"].startswith("0 1 2 15 32")
    positions = dict(line.split()[:2] for line in fields["positions"].splitlines()[1:])
    assert positions["alpha"] == "42"
    assert positions["zeta"] == "0-16"
    table = fields["block table"].splitlines()[1:]
    assert table[4].split()[:4] == ["epsilon", "before", "no", "row"]
    assert table[5].endswith("REPLACED")
    assert not table[7].endswith("REPLACED")  # a new request has no table that could be
    assert "none: this chunk does not reach the end" in fields["logits_indices"]
    assert fields["sampled"].startswith("3 tokens")


def test_a_step_that_only_cleans_up_runs_no_model() -> None:
    engine = MadeUpEngine()
    engine.add("one", num_prompt_tokens=5, max_tokens=2)
    state = folded([HEADER, *engine.run(10)])
    step = state.current
    assert step is not None
    assert step.is_cleanup_only
    texts = {field.label: line_text(field.summary) for field in worker_fields(step, state)}
    assert "does not run" in texts["forward"]
    assert [line_text(line).split()[:3] for line in worker_fields(step, state)[0].details] == [["-", "forget", "one"]]


# ---------------------------------------------------------------------------------------------------- the screen
@pytest.mark.parametrize("size", [(200, 60), (120, 40), (80, 24), (60, 16), (40, 10)], ids=lambda size: f"{size[0]}x{size[1]}")
@in_virtual_time
async def test_enter_on_a_step_opens_it_and_every_field_can_be_reached_and_explained(size: tuple[int, int]) -> None:
    async with running(ListSource(busy_items()), size=size) as (app, pilot):
        await press(app, pilot, "2", "up", "up", "up", "enter")
        view = app.view
        assert isinstance(view, FrameView)
        assert view.text.startswith("─ step 24, field by field")
        for _half in range(2):
            await press(app, pilot, "home")
            num_fields = len(view._halves[int(view.on_worker)])
            seen = set()
            for _ in range(num_fields):
                lines = view.lines
                under = [part.text for line in lines for part in line if part.role == "cursor"]
                assert len(under) == 1, view.text
                seen.add(under[0])
                if size[1] >= 16:
                    assert any(part.role == "accent" and part.text == under[0] for part in lines[-4 - (size[0] < 80)] + lines[-5]), (
                        view.text
                    )
                await press(app, pilot, "down")
            assert len(seen) == num_fields
            await press(app, pilot, "tab")
        await press(app, pilot, "left")
        assert view.text.startswith("─ step 23,")
        await press(app, pilot, "right", "right")
        assert view.text.startswith("─ step 25,")
        await press(app, pilot, "end")
        assert view.text.startswith("─ step 27,")
        await press(app, pilot, "escape")
        assert app.view.id == "step"


@in_virtual_time
async def test_a_click_on_a_field_puts_the_cursor_there() -> None:
    async with running(ListSource(busy_items()), size=(120, 40)) as (app, pilot):
        await press(app, pilot, "2", "up", "up", "up", "enter")
        view = app.view
        assert isinstance(view, FrameView)
        row = next(y for y, line in enumerate(view.text.splitlines()) if "slot_mapping" in line)
        await pilot.click(view, offset=(view._split + 3, row))
        await press(app, pilot)
        assert [part.text for line in view.lines for part in line if part.role == "cursor"] == ["slot_mapping"]


@in_virtual_time
async def test_the_question_mark_takes_the_words_away_and_brings_them_back() -> None:
    async with running(ListSource(busy_items()), size=(120, 40)) as (app, pilot):
        await press(app, pilot, "2", "enter")
        assert "The number of the step." in app.view.text
        await press(app, pilot, "question_mark")
        assert "The number of the step." not in app.view.text


def test_long_lines_are_broken_at_blanks_and_lose_nothing() -> None:
    line = [Part("name   ", "accent"), Part("1 2 3 4 5 6 7 8 9 10 11 12", "value"), Part(" end", "muted")]
    for width in range(8, 50):
        lines = wrap_line(line, width, indent=7)
        assert all(len(line_text(part)) <= width for part in lines)
        assert "".join(map(line_text, lines)).split() == line_text(line).split()
