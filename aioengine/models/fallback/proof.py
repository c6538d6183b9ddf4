"""The dry run that proves a model at load: what its layers want of attention, and two prompts against its own eager attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aioengine.attention.base import AttentionBackend, AttentionBatch
from aioengine.errors import ModelError
from aioengine.kv_cache_groups import group_layers
from aioengine.models.base import CausalLM
from aioengine.models.fallback.attention import LISTENING, SERVING, STEP, LayerFacts, Listener, MaskRule
from aioengine.models.fallback.config import TransformersConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LENGTHS = (21, 12)  # tokens of the two prompts
# What each step computes of them, (first, end): a chunk beside a prompt, the rest of it beside one token, single tokens.
_STEPS = (((0, 8), (0, 9)), ((8, 20), (9, 10)), ((20, 21), (10, 11)), (None, (11, 12)))
# Differences of logits that rounding makes, as a share of their range.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


class Proof:
    """Raises ModelError, naming the model, at the first thing that is not as it must be."""

    def __init__(self, model: PreTrainedModel, config: TransformersConfig, *, device: torch.device) -> None:
        self._model = model
        self._config = config
        self._device = device
        generator = torch.Generator().manual_seed(0)
        length = min(_LENGTHS[0], config.max_position_embeddings)
        self._prompts = [torch.randint(0, config.vocab_size, (min(n, length),), generator=generator).to(device) for n in _LENGTHS]

    def check_layers(self) -> None:
        """Each layer attends once, with the heads and over the window that config.json implies, and to nothing else."""
        listener = Listener()
        self._model.set_attn_implementation(LISTENING)
        try:
            self._run(self._prompts[0], **{STEP: listener})
        finally:
            self._model.set_attn_implementation(SERVING)
        heard = listener.layers
        if sorted(heard) != list(range(self._config.num_layers)):
            silent = [layer for layer in range(self._config.num_layers) if layer not in heard]
            raise self._refusal(
                f"of {self._config.num_layers} layers {len(heard)} hand keys and values to attention"
                + (f", and not layer {silent[0]}" if silent else "")
            )
        for layer, facts in sorted(heard.items()):
            self._check_shape(layer, facts)
            self._check_window(layer, facts)

    def _check_shape(self, layer: int, facts: LayerFacts) -> None:
        c = self._config
        found = (facts.num_heads, facts.num_kv_heads, max(facts.key_dim, facts.value_dim))
        if found != (c.num_heads, c.num_kv_heads, c.head_dim):
            raise self._refusal(
                f"layer {layer} has {found[0]} query and {found[1]} key/value heads of {found[2]}, where config.json implies "
                f"{c.num_heads}, {c.num_kv_heads} and {c.head_dim}; all layers must be alike"
            )

    def _check_window(self, layer: int, facts: LayerFacts) -> None:
        """What the layer's code says and masks is what the cache keeps for it."""
        window, longest = self._config.layer_windows[layer], self._config.max_position_embeddings
        stated = None if facts.window is None or facts.window >= longest else facts.window
        if facts.rule is None and stated != window:
            raise self._refusal(f"layer {layer} attends over a window of {stated} positions, where config.json implies {window}")
        if facts.rule is not None and (wrong := _first_difference(facts.rule, window, longest)) is not None:
            query, key, sees = wrong
            raise self._refusal(
                f"a query of layer {layer} at position {query} {'sees' if sees else 'does not see'} position {key}; config.json implies "
                + ("no window" if window is None else f"a window of {window}")
            )

    def reference(self) -> list[torch.Tensor]:
        """Of each prompt, [n, vocab_size] float32: the logits of transformers' eager attention."""
        self._model.set_attn_implementation("eager")
        try:
            return [self._run(prompt).logits[0].float() for prompt in self._prompts]
        finally:
            self._model.set_attn_implementation(SERVING)

    def _run(self, prompt: torch.Tensor, **more: Any) -> Any:
        positions = torch.arange(len(prompt), device=self._device)
        try:
            return self._model(input_ids=prompt[None], position_ids=positions[None], use_cache=False, **more)
        except ModelError as error:
            raise self._refusal(str(error)) from error
        except Exception as error:  # of transformers' code for this model
            raise self._refusal(f"its code fails: {type(error).__name__}: {' '.join(str(error).split()):.300}") from error

    def compare(self, model: CausalLM, backend: AttentionBackend, expected: Sequence[torch.Tensor]) -> float:
        """The largest difference of the paged run's logits, as a share of the range of `expected`."""
        try:
            found = self._paged(model, backend)
        except ModelError as error:
            raise self._refusal(str(error)) from error
        except Exception as error:
            raise self._refusal(
                f"its code fails over a paged cache: {type(error).__name__}: {' '.join(str(error).split()):.300}"
            ) from error
        shape = found[0].shape[-1]
        if shape != self._config.vocab_size:
            raise self._refusal(f"it has logits of {shape} tokens, vocab_size is {self._config.vocab_size}")
        spread = max(float(logits.max() - logits.min()) for logits in expected)
        difference = max(float((ours - theirs).abs().max()) for ours, theirs in zip(found, expected, strict=True)) / max(spread, 1e-30)
        tolerance = _TOLERANCES.get(backend.config.dtype, 5e-2)
        if not difference <= tolerance:  # NaN is none either
            raise self._refusal(
                f"in a dry run its logits differ from those of transformers' eager attention by {difference:.1e} of their range, "
                f"more than {tolerance:.0e}"
            )
        return difference

    def _paged(self, model: CausalLM, backend: AttentionBackend) -> list[torch.Tensor]:
        tables = _block_tables([len(prompt) for prompt in self._prompts], backend.config.block_size)
        num_blocks = 1 + sum(len(table) for table in tables)
        caches = [backend.allocate_kv_cache(num_blocks, self._device) for _ in range(model.num_layers)]
        rows: list[list[torch.Tensor]] = [[] for _ in self._prompts]
        groups = group_layers(self._config.layer_windows)  # all with the same table: each layer has a cache of its own
        for step in _STEPS:
            parts = [(i, *part) for i, part in enumerate(step) if part is not None and part[0] < len(self._prompts[i])]
            parts = [(i, first, min(end, len(self._prompts[i]))) for i, first, end in parts]
            if not parts:
                continue
            ids = torch.cat([self._prompts[i][first:end] for i, first, end in parts])
            positions = torch.cat([torch.arange(first, end, device=self._device) for _, first, end in parts])
            batch = _make_batch(parts, tables, block_size=backend.config.block_size, device=self._device)
            batches = [replace(batch, sliding_window=group.sliding_window) for group in groups]
            metadata = tuple(backend.build_metadata(of_group) for of_group in batches)
            hidden = model.forward(ids, positions, kv_caches=caches, attention_metadata=metadata)
            logits = model.compute_logits(hidden)
            pieces = logits.split([end - first for _, first, end in parts])
            for (i, _, _), piece in zip(parts, pieces, strict=True):
                rows[i].append(piece)
        return [torch.cat(row) for row in rows]

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(
            f"architecture {self._config.class_name!r} is not supported by transformers' own code over a paged cache: {reason}"
        )


def _first_difference(rule: MaskRule, window: int | None, longest: int) -> tuple[int, int, bool] | None:
    """A query and a key at which the rule is not that of a causal window, and what it is; looked for where windows begin and end."""
    edges = {0, 1, 2, 19, longest - 1} | (set() if window is None else {window - 1, window, window + 1, 2 * window})
    places = sorted(place for place in edges if 0 <= place < longest)
    for query in places:
        near = {query - 1, query, query + 1} | (set() if window is None else {query - window, query - window + 1})
        for key in sorted({place for place in {*near, *places} if 0 <= place < longest}):
            expected = key <= query and (window is None or key > query - window)
            if rule.sees(query, key) != expected:
                return query, key, not expected
    return None


def _block_tables(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    """Blocks for each prompt, from the last one down, so that none lie in order."""
    counts = [-(-length // block_size) for length in lengths]
    free = iter(range(sum(counts), 0, -1))
    return [[next(free) for _ in range(count)] for count in counts]


def _make_batch(
    parts: Sequence[tuple[int, int, int]], tables: Sequence[Sequence[int]], *, block_size: int, device: torch.device
) -> AttentionBatch:
    """parts: prompt, first and end position of each."""
    seq_lens = np.array([end for _, _, end in parts], dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum([end - first for _, first, end in parts]))).astype(np.int32)
    width = max(len(table) for table in tables)
    table = np.array([[*tables[i], *[0] * (width - len(tables[i]))] for i, _, _ in parts], dtype=np.int32)
    slots = [
        tables[i][position // block_size] * block_size + position % block_size for i, first, end in parts for position in range(first, end)
    ]
    return AttentionBatch(
        num_reqs=len(parts),
        num_tokens=len(slots),
        max_query_len=max(end - first for _, first, end in parts),
        max_seq_len=int(seq_lens.max()),
        query_start_loc=torch.from_numpy(starts).to(device),
        query_start_loc_np=starts,
        seq_lens=torch.from_numpy(seq_lens).to(device),
        seq_lens_np=seq_lens,
        block_table=torch.from_numpy(table).to(device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
    )
