"""The findings of this package in words: whole sentences, for the screens, the plain text and the JSON."""

from __future__ import annotations

from collections.abc import Sequence

from aioengine_tui.model.log import name_some, plural
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.why.advice import Advice, Finding, advise
from aioengine_tui.model.why.hindsight import KnownInHindsight
from aioengine_tui.model.why.slow import Companion, SlowToken, StepCompany, slowest_token, step_company
from aioengine_tui.model.why.waiting import Holder, WhyWaiting, why_waiting

_NAMED = 3  # requests that a sentence names

STOP_LETTERS: dict[str, str] = {
    "queue_empty": " ", "budget": "B", "max_num_seqs": "S", "no_blocks": "K", "preempted": "P", "in_flight": "F",
}  # fmt: skip
"""One letter for each reason why a step admitted nobody further; a blank: nobody was waiting."""


def advice_line(state: DashboardState, *, most: int = 1 << 30, known: KnownInHindsight | None = None) -> str | None:
    """The one line for the whole engine, brief where it would be longer than `most`; None as long as there is too little to go by.

    known: what the simulation of an advice has shown goes with it, and before it where there is no room for both.
    """
    advice = advise(state)
    if advice is None:
        return None
    shown = known.of(advice.findings[0].setting, advice.findings[0].proposed) if known is not None and advice.findings else ""
    brief = advice_words(advice, brief=True)
    for words in (advice_words(advice), brief):
        line = f"{words}; {shown}" if shown else words
        if len(line) <= most:
            return line
    return shown or brief


def request_words(state: DashboardState, request_id: str) -> list[str]:
    """What there is to say of one request: why it waits, or its slowest token. Empty: nothing."""
    waiting = why_waiting(state, request_id)
    if waiting is not None:
        return waiting_words(waiting)
    slow = slowest_token(state, request_id)
    return [] if slow is None else [slow_words(slow)]


def step_words(state: DashboardState, step_id: int) -> str | None:
    """What shared a step; None if it is no longer kept."""
    company = step_company(state, step_id)
    return None if company is None else company_words(company)


# ---------------------------------------------------------------------------------------------------- waiting
def waiting_words(why: WhyWaiting) -> list[str]:
    """The place, the cause, who holds what is missing, and who must end first: a sentence each."""
    behind = f", behind {name_some(why.before, _NAMED)}" if why.before else ""
    sentences = [f"{_ordinal(why.place)} of {why.num_waiting} in the queue{behind}", _cause_words(why)]
    if _lacks_blocks(why) and why.holders:
        sentences.append(f"blocks held: by {_holders_words(why.holders)}")
    sentences.append(_must_end_words(why))
    return sentences


def _lacks_blocks(why: WhyWaiting) -> bool:
    return why.num_blocks_needed + why.num_blocks_before + why.num_blocks_claimed > why.num_free_blocks


def _cause_words(why: WhyWaiting) -> str:
    blocks = f"it needs {plural(why.num_blocks_needed, 'KV block')}"
    if why.num_blocks_before:
        blocks += f", those before it {why.num_blocks_before}"
    blocks += f"; {why.num_free_blocks} are free"
    if why.num_blocks_claimed:
        blocks += f", and the next step takes {why.num_blocks_claimed} of them for who runs"
    match why.cause:
        case "paused":
            return "the engine is paused: no step is scheduled until it is resumed"
        case "unknown":
            return f"why is not known: no step has been seen; {blocks}"
        case "new":
            return f"it came after the latest step, and the next one looks at the queue; {blocks}"
        case "budget":
            return f"budget: the latest step had no token left for it; {blocks}"
        case "max_num_seqs":
            return f"max_num_seqs: {plural(why.num_running, 'request')} run and {why.max_num_seqs or 'no more'} may; {blocks}"
        case "no_blocks":
            return f"no_blocks: {blocks}"
        case "preempted":
            return f"preempted: the latest step had to preempt, and such a step admits nobody; {blocks}"
        case "in_flight":
            return "in_flight: the last token of the next one is still being sampled; it is admitted when that is known"
        case _:  # of a newer engine
            return f"{why.cause}: {blocks}"


def _holders_words(holders: Sequence[Holder]) -> str:
    def alone(holder: Holder) -> str:
        return "" if holder.num_own_blocks == holder.num_blocks else f" ({holder.num_own_blocks} alone)"

    named = ", ".join(f"{holder.request_id} {holder.num_blocks}{alone(holder)}" for holder in holders[:_NAMED])
    more = holders[_NAMED:]
    return named + (f", and {sum(holder.num_blocks for holder in more)} by {len(more)} more" if more else "")


def _must_end_words(why: WhyWaiting) -> str:
    if not why.must_end and not why.num_before_must_end:
        return "nobody has to end first: the next step with tokens left admits it"
    left = {holder.request_id: holder.num_tokens_left for holder in why.holders}
    last = max((left.get(request_id, 0) for request_id in why.must_end), default=0)
    if why.num_before_must_end:
        running = f"all {len(why.must_end)} that run and " if why.must_end else ""
        return f"{running}{why.num_before_must_end} of those before it must end first"
    return f"{name_some(why.must_end, _NAMED)} must end first: in {plural(last, 'token')} at the latest"


def _ordinal(place: int) -> str:
    if place == 1:
        return "next"
    ending = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{ending}"


# ---------------------------------------------------------------------------------------------------- slow
def slow_words(slow: SlowToken) -> str:
    usual = f", usually {_ms(slow.usual)}" if slow.usual is not None else ""
    head = f"slowest token: {_ms(slow.gap)}{usual}"
    step = f"step {slow.company.step_id}"
    match slow.cause:
        case "prompt":
            others = [companion for companion in slow.company.prompts if companion.request_id != slow.request_id]
            return f"{head}: {_prompts_words(others)} in {step}"
        case "preempted":
            return f"{head}: it was preempted and computed its tokens again, {plural(slow.num_steps_without, 'step')} without one"
        case "not_scheduled":
            return f"{head}: {plural(slow.num_steps_without, 'step')} gave it no token, as others came first"
        case "step":
            return f"{head}: {step} took so long by itself, with {plural(slow.company.num_decodes, 'request')} decoding"


def company_words(company: StepCompany) -> str:
    """How long a step took, and for whom: "37 ms, usually 12 ms: load-0's 81-token chunk, 7 decode"."""
    time = _ms(company.duration) if company.duration is not None else "not back yet"
    usual = f", usually {_ms(company.usual)}" if company.is_slow and company.usual is not None else ""
    parts = [_prompts_words(company.prompts)] if company.prompts else []
    if company.num_decodes:
        parts.append(f"{company.num_decodes} decode{'s' if company.num_decodes == 1 else ''}")
    return f"{time}{usual}: {', '.join(parts) or 'no tokens, only word of who ended'}"


def _prompts_words(prompts: Sequence[Companion]) -> str:
    named = [f"{companion.request_id}'s {companion.num_tokens}-token {_KIND_WORDS[companion.cell]}" for companion in prompts]
    return name_some(named, _NAMED)


_KIND_WORDS: dict[str, str] = {"prefill": "prompt", "chunk": "chunk", "resumed": "recomputation"}


def _ms(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 0.01 else f"{value * 1e3:.0f} ms" if value < 10 else f"{value:.1f} s"


# ---------------------------------------------------------------------------------------------------- advice
def advice_words(advice: Advice, *, brief: bool = False) -> str:
    """The heaviest finding in one line, with the setting to change."""
    if not advice.findings:
        more = "" if brief else f": of the last {advice.num_steps} steps hardly one kept a request waiting or a token late"
        return f"nothing stands in the way{more}"
    finding = advice.findings[0]
    if brief:
        return f"{remedy_words(finding, brief=True)}: {_brief_words(finding)}"
    return f"{_seen_words(advice, finding)}: {remedy_words(finding)}"


def _brief_words(finding: Finding) -> str:
    share = _percent(finding.share)
    match finding.cause:
        case "budget" | "max_num_seqs":
            return f"{share} of steps stopped there"
        case "no_blocks":
            return f"{share} of steps lacked KV blocks"
        case "long_prompts":
            return f"prompts held up decoding {share} of the time"


def _seen_words(advice: Advice, finding: Finding) -> str:
    share, steps = _percent(finding.share), f"the last {advice.num_steps} steps"
    match finding.cause:
        case "budget":
            return f"{share} of {steps} stopped admitting at the token budget"
        case "max_num_seqs":
            return f"{share} of {steps} stopped admitting at max_num_seqs"
        case "no_blocks":
            words = f"{share} of {steps} lacked KV blocks"
            if advice.num_preemptions:
                computed = advice.num_prompt_tokens + advice.num_recomputed_tokens
                again = f"recomputed {_count(advice.num_recomputed_tokens)} of {_count(computed)} prompt tokens"
                words += f"; {plural(advice.num_preemptions, 'preemption')} {again}"
            return words
        case "long_prompts":
            return f"prompts held up decoding in {_count(finding.num_steps)} of {steps}, {share} of the time"


def remedy_words(finding: Finding, *, brief: bool = False) -> str:
    """The setting to change, its value and the one to try; another way out, unless it is to be brief."""
    raised = finding.present is not None and finding.proposed is not None and finding.proposed > finding.present > 0
    verb = "raise" if raised or finding.cause != "long_prompts" else "lower" if finding.present else "set"
    if finding.cause == "long_prompts" and finding.setting == "long_prefill_token_threshold" and not finding.present:
        change = f" to {finding.proposed}" if finding.proposed is not None else ""
    elif finding.present is not None and finding.proposed is not None:
        change = f" ({finding.present} to {finding.proposed})"
    else:
        change = ""
    return f"{verb} {finding.setting}{change}{' ' + finding.otherwise if finding.otherwise and not brief else ''}"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _count(value: int) -> str:
    return f"{value:,}" if value < 100_000 else f"{value / 1e3:,.0f}k" if value < 10_000_000 else f"{value / 1e6:,.1f}M"
