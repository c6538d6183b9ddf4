"""What the labels of the screens mean: one table, which `?` and the frame inspector read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from types import MappingProxyType

from aioengine_tui.widgets.text import Line


def explain(label: str) -> str | None:
    """One or two plain sentences about a label; None for what is no label of ours."""
    return EXPLANATIONS.get(label.strip().lower())


def labels_of(lines: Iterable[Line]) -> Iterator[str]:
    """The labels in what a screen shows: heads of columns, muted words in front of a value, names of fields."""
    for line in lines:
        for index, (text, role) in enumerate(line):
            follower = line[index + 1].role if index + 1 < len(line) else ""
            if role == "header":
                yield from (name for name in re.split(r"\s{2,}", text.strip(" ↑↓")) if name)
            elif (role == "muted" and follower in ("value", "stale")) or (role == "key" and index == 0):
                yield text.strip(" :")


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
        "evicted": ("Cached blocks that were taken for something else, so that their content was lost. Counted since the engine started."),
        # ---- prefix tree
        "cached blocks": "Blocks whose content can be found by a request whose prompt begins alike.",
        "of them free": "Cached blocks that nobody holds. They are found as well, until they are taken for something else.",
        "runs": "Blocks that follow each other without a branch are one row: a run.",
        "prefix": "The name (hash) of the first block of a run. What stands below it goes on from it.",
        "tokens": "Tokens.",
        "hits": "How often a request was admitted with these blocks found in the cache, since this viewer attached.",
        "begins with": "The text that begins here, where the engine publishes texts.",
        "text": "The text that begins here, where the engine publishes texts.",
    }
)
