"""The findings of this package as plain JSON values, with the words that the screens show."""

from __future__ import annotations

import dataclasses
from typing import Any

from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.why.advice import advise
from aioengine_tui.model.why.slow import step_company
from aioengine_tui.model.why.waiting import why_waiting
from aioengine_tui.model.why.words import advice_words, company_words, remedy_words, waiting_words

_SLOW_STEPS = 5
_FIRST_WAITING = 20


def why_to_json(state: DashboardState) -> dict[str, Any]:
    """`advice` (null: too few steps), the first 20 `waiting` in the order of the queue, and the `slow_steps`, the slowest first."""
    advice = advise(state)
    waiting = [why for row in state.queue()[:_FIRST_WAITING] if (why := why_waiting(state, row.request_id)) is not None]
    slowest = sorted((mark for mark in state.waterfall.marks if mark.duration is not None), key=lambda mark: -(mark.duration or 0.0))
    companies = [company for mark in slowest[:_SLOW_STEPS] if (company := step_company(state, mark.step_id)) is not None]
    told = None
    if advice is not None:
        findings = [{**dataclasses.asdict(finding), "words": remedy_words(finding)} for finding in advice.findings]
        stops = [{"admission_stop": stop, "num_steps": count} for stop, count in advice.stops.items()]
        told = {**dataclasses.asdict(advice), "stops": stops, "findings": findings, "words": advice_words(advice)}
    return {
        "advice": told,
        "waiting": [{**dataclasses.asdict(why), "words": waiting_words(why)} for why in waiting],
        "slow_steps": [{**dataclasses.asdict(company), "words": company_words(company)} for company in companies],
    }
