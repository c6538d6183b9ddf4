"""What the labels of the screens mean: one table, which `?` and the frame inspector read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from types import MappingProxyType

from aioengine_tui.widgets.text import CLIPPED, Line, Part


def explain(label: str) -> str | None:
    """One or two plain sentences about a label; None for what is no label of ours."""
    return EXPLANATIONS.get(label.strip().lower())


def labels_of(lines: Iterable[Line]) -> Iterator[str]:
    """The labels on a screen: heads of columns, headings, muted words in front of what they name, names of fields."""
    for line in lines:
        for index, (text, role, *_) in enumerate(line):
            follower = line[index + 1] if index + 1 < len(line) else Part("", "muted")
            if role == "header":
                yield from _heads(text.strip(" ↑↓"))
                continue
            names_something = role == "muted" and follower.role not in _QUIET and follower.text.strip() and text.endswith(" ")
            if role == "title" or (role == "key" and index == 0) or names_something:
                label = _NUMBERS.sub("", text.strip(" :"))  # step 27: a step
                if role == "title" and label.partition(" ")[0] in ("request", "run", "step") and label.lower() not in EXPLANATIONS:
                    label = label.partition(" ")[0]  # request alpha: a request
                if _LABEL.fullmatch(label):
                    yield label


def _heads(text: str) -> Iterator[str]:
    """The heads of columns; where only one blank is between two of them, the longest that the table knows comes first."""
    words = text.split()
    while words:
        for count in range(len(words), 0, -1):
            name = " ".join(words[:count])
            if count == 1 or name.lower() in EXPLANATIONS:
                if CLIPPED not in name and not name.isdigit():
                    yield name
                del words[:count]
                break


_QUIET = frozenset({"muted", "border", "header"})
_NUMBERS = re.compile(r"(?:^|[ =])[~]?[0-9].*")
_LABEL = re.compile(r"[+~!]?[A-Za-z_][A-Za-z_ /,.()0-9+-]+")  # not a sign, not a number


def explained(labels: Iterable[str]) -> list[tuple[str, str]]:
    """(label, words) of those that have some, each once, in the order given."""
    found = ((label.strip(), explain(label)) for label in dict.fromkeys(labels))
    return [(label, words) for label, words in found if words is not None]


EXPLANATIONS = MappingProxyType(
    {
        # ---- the frame: what the scheduler sends
        "step_id": ("The number of the step. Steps are planned one after the other, and their results are taken in in the same order."),
        "scheduled_new_reqs": (
            "Requests that the worker has never heard of. They are sent in full, once: prompt, sampling parameters, "
            "block table, and the position where the step starts."
        ),
        "scheduled_cached_reqs": (
            "Requests that the worker knows. Only what changed is sent: where the step starts, and new blocks. None: "
            "no block was added. REPLACED: it comes back after a preemption, and these blocks are its whole table."
        ),
        "num_scheduled_tokens": (
            "How many tokens of each request go through the model in this step. More than one: a prompt, a chunk of "
            "it, guesses, or what a preemption lost."
        ),
        "total_num_scheduled_tokens": (
            "The sum of all requests. It is at most the token budget, max_num_batched_tokens, so that no step takes too long."
        ),
        "scheduled_spec_decode_tokens": (
            "Guesses (draft tokens) that the step checks. Those that are right are kept, from the first wrong one on they are dropped."
        ),
        "finished_req_ids": (
            "Requests that ended since the step before, by whatever cause. The scheduler has freed their blocks; the "
            "worker forgets them when it gets this step."
        ),
        "preempted_req_ids": (
            "Requests that lost their blocks to others. The worker frees their rows and keeps their parameters: they come back."
        ),
        "structured_output_request_ids": (
            "Requests that sample a token in this step and may only take one that their grammar allows. A mask for "
            "each is computed while the model runs."
        ),
        "new_block_ids_to_zero": "Blocks whose memory the worker fills with zeros before use. Only some caches need it.",
        "blocks allocated": (
            "Blocks that were taken from the free queue since the event before: by new tokens, or by a hit on what nobody owned."
        ),
        "blocks freed": (
            "Blocks whose last owner let go since the event before. They are in the free queue now; what they hold can still be found."
        ),
        "blocks evicted": "Blocks that were taken though their content could still be found: from now on it cannot.",
        "queue_depth": ("Steps that were planned and whose tokens are not known yet. Two: the next step is planned while the model runs."),
        # ---- the frame: what the worker does
        "what the worker does with it": (
            "The worker runs the model. This half is derived from what it was sent and nothing else, as the worker itself does it."
        ),
        "_update_states": (
            "The first thing the worker does: it brings its tables up to date. Who is gone leaves first, because the "
            "rows they free may be needed by those who come."
        ),
        "query_start_loc": (
            "All requests lie one behind the other in one long row of tokens. This is where each begins, and at the "
            "end where the last one ends."
        ),
        "positions": ("The place of each token in its own request, from 0. The model needs it to know what comes before what."),
        "token gather": (
            "Where the tokens that go in are read from: the worker's own table of prompt and output. Sampled tokens "
            "were put there by the worker itself; they are never sent."
        ),
        "block table": (
            "Which block holds which tokens of a request: entry i holds positions i * block_size and on. Before the step, and after it."
        ),
        "slot_mapping": "Where the keys and values of each token are written: block id * block_size + place in the block.",
        "seq_lens": "How many tokens attention looks at for each request: everything computed before, and this step's.",
        "logits_indices": (
            "The tokens after which a next one is sampled: the last known one of each request, and with guesses one "
            "more for each. A chunk in the middle of a prompt gives none."
        ),
        "sampled": (
            "The tokens that came back. The worker keeps them in its table as well, so that the next step can read "
            "them without waiting for the scheduler."
        ),
        "grammar masks": (
            "How long it took to compute which tokens the grammars allow. It is done beside the forward, so it should cost nothing."
        ),
        "forward": "How long the model ran.",
        "sampling": "How long it took to choose a token from the model's output.",
        "ended with this step": ("Requests whose last token came with this step. The worker learns it in a later step's finished_req_ids."),
        # ---- KV blocks
        "block": ("A block holds the keys and values of block_size tokens. It is the unit in which KV memory is given and taken."),
        "blocks": "KV blocks: those under the cursor, or those that a request holds.",
        "ref_cnt": "How many requests hold the block. More than one: they share a prefix. 0: it is free.",
        "owners": "The requests that hold the block. Each has a colour and a letter of its own.",
        "holds positions": "Which tokens of its owner are in the block.",
        "slots in use": "How many tokens are in the block. Only the last block of a request is not full.",
        "slot numbers": "The places of its tokens in the whole cache: block id * block_size + place in the block.",
        "hash": (
            "A name for what the block holds and everything before it. Equal hashes mean equal prefixes; that is how blocks are found."
        ),
        "eviction order": (
            "The place in the queue of free blocks: 1 is taken next. Blocks that cache nothing come first, then the least recently used."
        ),
        "last use": "The last step that had an owner of it.",
        "used": "Blocks that requests hold, of all there are.",
        "shared": "Blocks that several requests hold, because their prompts begin alike.",
        "free": "Blocks that can be taken, whether or not their content can still be found.",
        "of them cached": "Free blocks whose content can still be found, until somebody takes them.",
        "free, cached": "Free blocks whose content can still be found, until somebody takes them.",
        "empty": "Free blocks that hold nothing worth finding.",
        "kv-cache group": (
            "Layers that see equally much share block tables. The group whose keys and values the block holds, and how far its layers see."
        ),
        "by group": "Blocks that requests hold in each KV-cache group: those of layers that see everything first, then by window.",
        "evicted": ("Cached blocks that were taken for something else, so that their content was lost. Counted since the engine started."),
        # ---- waterfall
        "a row and a column": (
            "A row is a request, a column a step of the engine. All that stands in one column was computed together: that is "
            "continuous batching. Read a row from left to right: it waits, its prompt is computed, then it gets a token a step, and ends."
        ),
        "stop line": (
            "Why the step admitted no further request, as a letter. A blank: nobody was left waiting. After its running requests a step "
            "admits waiting ones in order, until something runs out."
        ),
        "tokens line": "How much of the token budget (max_num_batched_tokens) the step used.",
        "blocks line": "How many of all KV blocks had an owner in the step. At the top: a new token may cost somebody their blocks.",
        "step line": "Where each step begins, in a picture over time. A wide step took long, and everybody in it waited for their token.",
        "█ prompt": "The whole rest of a new prompt was computed in the step. It gives the first token.",
        "▓ chunk": "A part of a prompt, cut so that the step does not get too long. A chunk that does not reach the end gives no token.",
        "▒ decode": "One token, sampled in the step before, went through the model, and the next one was sampled.",
        "2 guesses": "A digit: guesses were checked, and the step gave so many tokens.",
        "▚ resumed": "Tokens that had been computed before are computed again, because a preemption took the blocks they were in.",
        "! preempted": (
            "No block was free, so this request gave back all of its own and waits in the queue again. Often, it is a sign of too few "
            "blocks or too many requests at once."
        ),
        "- no token": "It runs, but the step had nothing for it: its last token is on the way, or others used up the budget.",
        "· waits behind": "It waits, and admission stopped at another request before it came to this one.",
        "b s k p f": (
            "It waits, and admission stopped at it. B: the token budget was used up. S: max_num_seqs requests run. K: too few free KV "
            "blocks. P: the step had to preempt, and then admits nobody. F: its last token is still in flight."
        ),
        "x ended": "It ended; the worker is told in this step and forgets it. X: by an abort or an error.",
        # ---- prefix tree
        "cached blocks": "Blocks whose content can be found by a request whose prompt begins alike.",
        "of them free": "Cached blocks that nobody holds. They are found as well, until they are taken for something else.",
        "run": "Blocks that follow each other without a branch, with the same owners and hits.",
        "x told": "The worker was told to forget a request.",
        "c cleaned_up": "The worker has forgotten a request: nothing of it is left.",
        "runs": "Blocks that follow each other without a branch are one row: a run.",
        "prefix": "The name (hash) of the first block of a run. What stands below it goes on from it.",
        "tokens": "Tokens.",
        "hits": "How often a request was admitted with these blocks found in the cache, since this viewer attached.",
        "begins with": "The text that begins here, where the engine publishes texts.",
        "text": "The text that begins here, where the engine publishes texts.",
        # ---- speed and latencies
        "steps/s": "Steps a second. A step is one run of the model for everybody.",
        "decode tokens/s": "Tokens that were written a second, by all requests together.",
        "prefill tokens/s": "Tokens of prompts that were read a second, without those that the prefix cache served.",
        "tokens/s": "Tokens that the request gets a second, from its first token on.",
        "tok/s": "Tokens that the request gets a second, from its first token on.",
        "ttft": ("Time to first token: from the arrival of a request to its first token. Waiting and reading the prompt are in it."),
        "ttft p50/95/99": "Time to first token of the last minute: half, 95 and 99 of 100 requests had it within this time.",
        "itl": "Inter-token latency: the time between two tokens of a request.",
        "itl p50/95/99": ("Time between two tokens of a request, in the last minute: half, 95 and 99 of 100 were within this."),
        "queue wait": "Time from the arrival of a request to its first step.",
        "queue wait p50/95/99": ("Time from arrival to the first step, in the last minute: half, 95 and 99 of 100 were within this."),
        "latency of the last minute": (
            "How long requests waited, in three percentiles: half, 95 and 99 of 100 were within the time shown."
        ),
        "latency": (
            "From the planning of a step until its tokens were taken in. With two steps in flight it is longer than a step's own work."
        ),
        "peak": "The largest value in the graph.",
        "host work hidden": "How much of planning and taking in happened while the model ran, so that it cost no time.",
        "up": "How long the engine has been running.",
        # ---- requests
        "request": "The id of the request.",
        "state": (
            "Where the request stands: it waits, runs, was preempted and waits again, ended and is cleaned up by the worker, or "
            "has finished."
        ),
        "step": ("What the request got in this step: tokens, and p prefill, c chunk, d decode or r resumed. Or the number of a step."),
        "prompt": "Tokens of the prompt.",
        "comp": "Tokens that have gone through the model (computed); their keys and values are in the cache.",
        "computed": "Tokens that have gone through the model; their keys and values are in the cache.",
        "cached": "Tokens of the prompt that the prefix cache had already, so that they need not be computed.",
        "to do": "Tokens of the prompt that have not gone through the model yet.",
        "out": "Tokens that were written.",
        "output": "Tokens that were written.",
        "blk": "KV blocks that the request holds.",
        "age": "Time since the request arrived; of an ended one, how long it lived.",
        "max": "The most tokens that the request may get.",
        "pre": "How often the request was preempted.",
        "preemptions": "How often the request was preempted: it lost its blocks to others and was read again.",
        "pri": "The priority: where the engine runs by priority, a lower number goes first.",
        "priority": "Where the engine runs by priority, a lower number goes first.",
        "wait": "Time from the arrival of the request to its first step.",
        "stop reason": "What ended the request, if it was a stop string or a stop token.",
        "timeline": "What happened to the request, and when, counted from its arrival.",
        "sampling parameters": "What the user asked for, where it is not the default.",
        "why": "Why the request waits, or what made a token of it slow.",
        # ---- counts
        "running": "Requests that are in steps.",
        "waiting": "Requests that have not been admitted yet.",
        "wait + preempted": ("Requests that have not been admitted yet, and those that lost their blocks and wait to come back."),
        "preempted": "Requests that lost their blocks and wait to come back.",
        "cleaning": "Requests that ended and that the worker has not forgotten yet.",
        "ended": "Requests that ended, in whatever way.",
        "aborted": "Requests whose user left, or that ran out of time.",
        "preempts": "How often a request lost its blocks to others.",
        "since attach": "Counted since this viewer came, not since the engine started.",
        "advice": "What held the engine back most, and which setting would change it.",
        "draft tokens accepted": "The share of guesses that were right.",
        # ---- settings
        "device": "Where the model runs.",
        "weights": "How the model's weights are computed with.",
        "policy": "Who goes first: fcfs, first come first served; or priority.",
        "seqs": "max_num_seqs: the most requests that run at a time.",
        "max_num_seqs": "The most requests that run at a time.",
        "kv": "The KV cache: the memory for keys and values.",
        "kv blocks in use": "The share of KV blocks that requests hold. When all are held, somebody is preempted.",
        "prefix cache hits": "The share of looked-up prompt tokens that the prefix cache had, of the last 1000 requests.",
        # ---- steps
        "budget": ("max_num_batched_tokens: the most tokens that go through the model in one step. The bar shows who got how many."),
        "prefill": "A whole prompt, or the rest of it, that is read in this step.",
        "chunk": "A part of a prompt that is too long for one step.",
        "decode": "Requests that are being written: one token each, or more with guesses.",
        "resumed": "Requests that came back after a preemption: their tokens are computed again.",
        "admission stopped by": "Why no further waiting request was admitted to this step.",
        "stopped by": "Why no further waiting request was admitted to this step.",
        "stop": "Why no further waiting request was admitted to a step, as a letter.",
        "reqs": "Requests in the step.",
        "+new": "Requests that were in a step for the first time.",
        "~res": "Requests that came back after a preemption.",
        "!pre": "Requests that were preempted in this step.",
        "xend": "Requests that ended; the worker is told in this step.",
        "since": "Time since the step before.",
        "blocks of the step": "KV blocks that were taken, given back and evicted in this step.",
        "lanes of": "When the phases of the latest steps ran, one lane each, over time.",
        "schedule": "The scheduler plans a step.",
        "execute": "The model runs.",
        "sample": "A token is chosen for each request.",
        "update": "The scheduler takes in the tokens: appends them, ends requests, frees blocks.",
        "last": "The latest steps, the newest at the end.",
        "in flight": "Planned, and the tokens are not known yet.",
        # ---- waterfall
        "both": "Several things in one column.",
        "no blocks": "The step admitted nobody further, because too few KV blocks were free.",
        "no token": "The request was in the step and got no token: a chunk that does not reach the end of the prompt.",
        "preempting": "The step took blocks from a running request, and admitted nobody.",
        "waits behind": "Requests that are admitted before this one.",
        # ---- frame
        "num_computed_tokens": "Where the step starts: so many tokens of the request have gone through the model before.",
        "num_output_tokens": "Output tokens of the request, those that are still being sampled included.",
        "new_block_ids": "Blocks that were added to the request's table. None: the last one still has room.",
        "before": "The block table as it was before the step.",
        "after": "The block table after the worker has taken in the step.",
        # ---- KV blocks: panel and legend
        "under the cursor": "The block, or the blocks, of the cell under the cursor.",
        "free queue, next first": "Free blocks in the order in which they will be taken.",
        "evicted in step": "Blocks that lost their cached content in the latest step, because somebody needed the room.",
        "owner": "A request that holds blocks. Its colour and letter are the same on every screen.",
        "partly full": "The last block of a request: coloured as far as its slots are in use.",
        "taken next": "The place of a free block in the order of eviction.",
        "new": "Taken by its owner a moment ago.",
        "evicted for it": "Taken a moment ago, and something that was cached in it was lost.",
        "freed": "Given back a moment ago.",
        "owned, most by one": ("The height is the share of the cell's blocks that are held; the colour, who holds more than half of them."),
        "by several": "The blocks of the cell are held, and nobody holds more than half of them.",
        "free, some cached": "All blocks of the cell are free, and some can still be found by their content.",
        "blocks of": "How many blocks a cell stands for.",
    }
)
