"""The ten scenes of `aioengine top --tour`, and what is said about them, for somebody who has never seen such an engine."""

from __future__ import annotations

from aioengine.commands.tour_recording import Cue, Happened, SceneScript, Stage
from aioengine.events.step_event import StepEvent
from aioengine.sampling_params import StructuredOutputsParams


# ---------------------------------------------------------------------------------------------------- what words may wait for
def starts(request_id: str) -> Happened:
    """It is scheduled for the first time."""
    return lambda event: any(new.req_id == request_id for new in event.output.scheduled_new_reqs)


def goes_on(request_id: str, *, tokens: int | None = None) -> Happened:
    """It is in a step after its first; with so many tokens, if that is said."""

    def happened(event: StepEvent) -> bool:
        is_in = request_id in event.output.scheduled_cached_reqs.req_ids
        return is_in and tokens in (None, event.output.num_scheduled_tokens[request_id])

    return happened


def is_over(request_id: str) -> Happened:
    """The worker is told to forget it."""
    return lambda event: request_id in event.output.finished_req_ids


def is_preempted(request_id: str) -> Happened:
    return lambda event: request_id in event.output.preempted_req_ids


def resumes(request_id: str) -> Happened:
    return lambda event: request_id in event.output.scheduled_cached_reqs.resumed_req_ids


def stops_at(reason: str) -> Happened:
    return lambda event: event.admission_stop == reason


def only_cleans_up(event: StepEvent) -> bool:
    return event.output.is_cleanup_only


def two_are_in_flight(event: StepEvent) -> bool:
    return event.queue_depth == 2


def guesses(event: StepEvent) -> bool:
    return bool(event.output.scheduled_spec_decode_tokens)


def is_masked(event: StepEvent) -> bool:
    return bool(event.output.structured_output_request_ids)


def evicts(event: StepEvent) -> bool:
    return bool(event.block_changes.evicted)


# ---------------------------------------------------------------------------------------------------- the scenes
async def _batching(stage: Stage) -> None:
    stage.ask("poem", "Write a poem.", 16)
    await stage.steps(5)
    stage.ask("letter", "A letter, please.", 20)
    await stage.steps(4)
    stage.ask("recipe", "Recipe for soup?", 10)


async def _chunks(stage: Stage) -> None:
    stage.ask("chat", "Hello there!", 22)
    await stage.steps(4)
    stage.ask("book", "A long text, to be summed up: " + "the river came down from the hills. " * 2, 8)


async def _prefix(stage: Stage) -> None:
    shared = "You are a friendly assistant. "
    stage.ask("sky", shared + "Why is the sky blue?", 12)
    await stage.steps(6)
    stage.ask("cats", shared + "Why do cats purr?", 12)
    await stage.steps(5)
    stage.ask("bread", shared + "What makes bread rise?", 8)
    await stage.steps(12)
    stage.ask("again", shared + "Why is the sky blue?", 6)


async def _preemption(stage: Stage) -> None:
    stage.ask("first", "Came first, goes on.", 30)
    stage.ask("second", "A little later.", 30)
    await stage.steps(1)
    stage.ask("third", "The last one gives way.", 26)


async def _clean_up(stage: Stage) -> None:
    stage.ask("short", "Short.", 5)
    stage.ask("long", "A longer one.", 14)


async def _overlap(stage: Stage) -> None:
    stage.ask("one", "Count the waves.", 24)
    stage.ask("two", "Count the boats.", 24)


async def _guessing(stage: Stage) -> None:
    stage.ask("song", "Sing: la la la la la la ", 40)


async def _masks(stage: Stage) -> None:
    stage.ask("free", "Say something.", 18)
    await stage.steps(2)
    stage.ask("json", "A number in JSON:", 14, structured_outputs=StructuredOutputsParams(regex=r'\{"n": [0-9]{3}\}'), ignore_eos=False)


async def _priority(stage: Stage) -> None:
    stage.ask("report", "A long report, no hurry.", 24, priority=5)
    stage.ask("backup", "A summary, no hurry.", 24, priority=5)
    await stage.steps(5)
    stage.ask("urgent", "Quick: yes or no?", 6, priority=0)


async def _abort(stage: Stage) -> None:
    stage.ask("stays", "I read to the end.", 20)
    stage.ask("leaves", "I close the page soon.", 60)
    await stage.steps(7)
    stage.hang_up("leaves")


SCENES: tuple[SceneScript, ...] = (
    SceneScript(
        "batching", "continuous batching", "batch", play=_batching,
        cues=(
            Cue(
                None,
                "A language model writes one token (a piece of a word) at a time, and needs all tokens before it:"
                " the prompt, and what it has written so far. The engine works in steps: in each, the model runs "
                "once, for every request that is being answered. A row is a request.",
            ),
            Cue(
                starts("poem"),
                "A request called poem has come. In its first step the model reads the whole prompt at once, 14 "
                "tokens (14p: p as in prefill, the reading of a prompt).",
            ),
            Cue(
                goes_on("poem"),
                "From now on poem gets one token in each step (1d: d as in decode). The bar fills from left to "
                "right: prompt, then output.",
            ),
            Cue(
                starts("letter"),
                "letter comes while poem is being written, and joins the very next step. Nobody waits until a "
                "batch is full or over: who comes joins, who is done leaves. That is continuous batching.",
            ),
            Cue(
                starts("recipe"),
                "recipe too. One run of the model now serves three requests, and costs little more than for one.",
            ),
            Cue(
                is_over("poem"),
                "poem has all its tokens and has left; the others go on as if nothing had happened. n: next "
                "scene, r: once more.",
            ),
        ),
    ),
    SceneScript(
        "chunks", "chunked prefill", "step", play=_chunks,
        options={"max_num_batched_tokens": 24},
        cues=(
            Cue(
                None,
                "Reading a prompt is work as well: every token of it goes through the model. A step has a budget "
                "of tokens (max_num_batched_tokens), here 24, so that no step takes too long. The bar at the top "
                "is the budget.",
            ),
            Cue(goes_on("chat"), "chat is being written, one token a step. Most of the budget is unused (dots)."),
            Cue(
                starts("book"),
                "book has a prompt of 103 tokens: more than a step has. The engine gives chat its one token "
                "first, and the rest of the budget to the first chunk of the prompt (c as in chunk).",
            ),
            Cue(
                goes_on("book", tokens=23),
                "The next chunk. chat gets its token in every step, so its reader sees no pause: that is what "
                "chunks are for.",
            ),
            Cue(
                goes_on("book", tokens=1),
                "All of the prompt has been read, and book is being written too. Only the last chunk gave a "
                "token.",
            ),
        ),
    ),
    SceneScript(
        "prefix", "prefix-cache hit", "blocks", play=_prefix,
        num_blocks=49,
        cues=(
            Cue(
                None,
                "What the model works out about a token (its keys and values, KV) is kept, so that it is never "
                "computed twice. It is stored in blocks, here of 4 tokens each. Every cell on this screen is a "
                "block.",
            ),
            Cue(
                starts("sky"),
                "sky holds 13 blocks for its prompt of 51 tokens. Its last block fills up as tokens are added; "
                "then it gets another one.",
            ),
            Cue(
                starts("cats"),
                "cats begins with the same words. Full blocks are found by what they hold: the first 8 are shared"
                " by both, and 32 tokens need not be computed. Only what differs gets blocks of its own.",
            ),
            Cue(starts("bread"), "bread as well: the shared blocks now have three owners (ref_cnt 3)."),
            Cue(
                is_over("sky"),
                "sky has ended. Blocks that only it held are free, but their content can still be found until "
                "somebody else needs the room.",
            ),
            Cue(
                starts("again"),
                "The same question once more: its whole prompt but the end is found (a hit), also in blocks that "
                "nobody owned. T shows the tree of prefixes.",
            ),
        ),
    ),
    SceneScript(
        "preemption", "preempt and resume", "blocks", play=_preemption,
        num_blocks=27,
        cues=(
            Cue(
                None,
                "The KV cache is small here: 26 blocks of 4 tokens. Three requests need more than that before "
                "they are done. What then?",
            ),
            Cue(starts("third"), "All three run. Each needs one more block after every 4 tokens."),
            Cue(
                is_preempted("third"),
                "No block is free. The engine takes them from the request that came last: third is preempted. It "
                "loses its blocks and waits; the tokens it has written are kept.",
            ),
            Cue(
                resumes("third"),
                "There is room again, and third resumes. It gets other blocks, and the model reads its prompt and"
                " its own output again, all at once (r as in resumed); what is still in the cache need not be "
                "read.",
            ),
            Cue(
                is_over("third"),
                "It gets exactly the tokens it would have got without the pause. Preemptions cost time, not "
                "words.",
            ),
        ),
    ),
    SceneScript(
        "cleanup", "the end of a request", "frame", play=_clean_up,
        cues=(
            Cue(
                None,
                "There are two sides: the scheduler decides, the worker runs the model. The worker remembers what"
                " it was told, so the scheduler sends only what changes. This page shows one step: left what was "
                "sent, right what the worker does.",
            ),
            Cue(
                starts("short"),
                "New requests are sent in full: prompt, parameters, and the list of its blocks, the block table "
                "(scheduled_new_reqs).",
                "scheduled_new_reqs",
            ),
            Cue(
                goes_on("short"),
                "After that only numbers: how far it is, and new blocks if there are any (scheduled_cached_reqs).",
                "scheduled_cached_reqs",
            ),
            Cue(
                is_over("short"),
                "short has its last token. The scheduler frees its blocks at once; the worker learns it in the "
                "next step, by finished_req_ids, and forgets it.",
                "finished_req_ids",
            ),
            Cue(
                only_cleans_up,
                "long has ended too, and nobody is left. A last step without tokens tells the worker: clean-up "
                "only, the model does not run.",
                "_update_states",
            ),
        ),
    ),
    SceneScript(
        "overlap", "overlap", "step", play=_overlap,
        is_about_lanes=True,
        cues=(
            Cue(
                None,
                "Deciding takes time as well. If the model had to wait for the scheduler after each step, it "
                "would idle.",
            ),
            Cue(
                two_are_in_flight,
                "So the scheduler plans the next step while the model still runs the one before: two steps are in"
                " flight. In the lanes, schedule and update (the program around the model) lie beside execute and"
                " sample (the model itself).",
            ),
            Cue(
                goes_on("one"),
                "How can step 3 be planned when the token of step 2 is not known? It need not be: the model reads"
                " it where it was written.",
            ),
            Cue(is_over("one"), "The price: an end is seen one step late. What was computed too much is thrown away."),
        ),
    ),
    SceneScript(
        "guesses", "guesses (draft tokens)", "frame", play=_guessing,
        options={"num_speculative_tokens": 4}, answer="la la la la la la ",
        cues=(
            Cue(
                None,
                "One token a step is slow when the next ones are easy to guess: text repeats itself. Guessing "
                "costs nothing; checking does little.",
            ),
            Cue(starts("song"), "song has a prompt that repeats. It is read as any other."),
            Cue(
                guesses,
                "The engine guesses how it goes on, by looking where the last words stood before "
                "(scheduled_spec_decode_tokens). The model checks all guesses in one step, as if they were part "
                "of the prompt.",
                "scheduled_spec_decode_tokens",
            ),
            Cue(
                goes_on("song", tokens=5),
                "Guesses that are right are kept: up to five tokens from one step. The first wrong one and all "
                "behind it are dropped; no token changes.",
                "sampled",
            ),
        ),
    ),
    SceneScript(
        "masks", "grammar masks", "frame", play=_masks,
        cues=(
            Cue(
                None,
                "Some output must have a form, JSON for example. The model does not know that; the engine makes "
                "sure of it.",
            ),
            Cue(
                is_masked,
                "json must match a pattern. Before a token is chosen for it, a mask forbids every token that the "
                "grammar does not allow here (structured_output_request_ids). It is computed while the model "
                "runs, so it costs no time.",
                "structured_output_request_ids",
            ),
            Cue(
                goes_on("json"),
                "The mask differs from token to token: first a brace, then a quote, then digits. free is in the "
                "same step and is not touched.",
            ),
            Cue(is_over("json"), "It wrote what the pattern allows and nothing else; the grammar ended it."),
        ),
    ),
    SceneScript(
        "priority", "priorities", "batch", play=_priority,
        options={"scheduling_policy": "priority", "max_num_seqs": 2},
        cues=(
            Cue(
                None,
                "Only two requests may run here at a time (max_num_seqs 2), and some are more urgent: a lower "
                "priority number goes first.",
            ),
            Cue(goes_on("backup"), "Two requests without hurry are running (priority 5)."),
            Cue(
                starts("urgent"),
                "urgent comes with priority 0. The later one of the others gives way: it is preempted, and keeps "
                "the tokens it has.",
            ),
            Cue(
                resumes("backup"),
                "urgent is done, and backup goes on where it was. Among equals nobody ever gives way: first come,"
                " first served.",
            ),
        ),
    ),
    SceneScript(
        "abort", "abort", "batch", play=_abort,
        cues=(
            Cue(None, "Users leave: they close the page, or a time-out strikes. Work for nobody must end at once."),
            Cue(goes_on("leaves"), "Both are being answered, each with one token a step. leaves would run for 60 tokens."),
            Cue(
                is_over("leaves"),
                "The client of leaves has gone. Its blocks are free at once, also though a step with it is still "
                "running: that token is dropped when it comes. The worker is told in this step.",
            ),
            Cue(
                is_over("stays"),
                "stays has read to the end, and the engine is as it was before: no request, no block in use. That"
                " was the tour. q quits.",
            ),
        ),
    ),
)  # fmt: skip
