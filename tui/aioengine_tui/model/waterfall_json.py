"""The history behind the waterfall as plain JSON values."""

from __future__ import annotations

from typing import Any

from aioengine_tui.model.waterfall import CELLS, Waterfall


def waterfall_to_json(waterfall: Waterfall) -> dict[str, Any]:
    """`marks`, one a step, oldest first, and `rows` by arrival: docs/dashboard-json.md has every key."""
    marks = waterfall.marks
    rows = waterfall.rows(marks[0].step_id, marks[-1].step_id) if marks else []
    return {
        "marks": [mark._asdict() for mark in marks],
        "rows": [
            {
                "request_id": row.request_id,
                "arrival_time": row.arrival_time,
                "runs": [[run.start_step, CELLS[run.cell], run.num_tokens, run.samples] for run in row.runs],
                "last_share_step": row.last_share_step,
                "end_step": row.end_step,
            }
            for row in rows
        ],
    }
