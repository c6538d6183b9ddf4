"""The ops of a step as measurable cases: inputs in the sizes of a real model, the reference, and whatever competes with it.

Each case knows the least work that its op can be: the bytes that must be read and written once, and the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from aioengine_bench.kernel_case import BLOCK_SIZE, CONTEXT, Inputs, KernelCase, Op, Variant
from aioengine_bench.native_kernels import native_cases, native_variants
from aioengine_kernels.activation import gelu_mul, gelu_mul_ref, silu_mul, silu_mul_ref
from aioengine_kernels.compile_report import MODELS, ModelShape
from aioengine_kernels.draw_tokens import draw_tokens, draw_tokens_ref
from aioengine_kernels.logprobs import token_logprobs, token_logprobs_ref
from aioengine_kernels.paged_attention import paged_attention, paged_attention_ref
from aioengine_kernels.penalties import apply_penalties, apply_penalties_ref
from aioengine_kernels.qk_norm_rope_cache import qk_norm_rope_cache, qk_norm_rope_cache_ref
from aioengine_kernels.reshape_and_cache import reshape_and_cache, reshape_and_cache_ref
from aioengine_kernels.rms_norm import rms_norm, rms_norm_ref
from aioengine_kernels.rope import apply_rope, apply_rope_ref, build_cos_sin_cache, inverse_frequencies
from aioengine_kernels.top_k_top_p import top_k_top_p, top_k_top_p_ref
from aioengine_kernels.zero_blocks import zero_blocks, zero_blocks_ref


def _num_bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, slots=True)
class CaseFactory:
    """Builds the cases for one device, dtype and model shape."""

    device: torch.device
    dtype: torch.dtype
    shape: ModelShape

    @classmethod
    def for_device(cls, device: torch.device) -> CaseFactory:
        """A large model on a GPU, the built-in one on a CPU."""
        if device.type == "cuda":
            return cls(device, torch.bfloat16, MODELS["llama-3-8b"])
        return cls(device, torch.float32, MODELS["smollm2-135m"])

    @property
    def tolerance(self) -> float:
        return 1e-5 if self.dtype == torch.float32 else 2e-2

    # ------------------------------------------------------------------ pieces
    def _random(self, *shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self.device, dtype or self.dtype)

    def _int(self, values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _triton(self, op: Op, tolerance: float | None = None) -> dict[str, Variant]:
        """The dispatcher, where it takes Triton and not the reference."""
        return {"triton": Variant(op, self.tolerance if tolerance is None else tolerance)} if self.device.type == "cuda" else {}

    def _cache(self, num_blocks: int) -> Inputs:
        key = self._random(num_blocks, BLOCK_SIZE, self.shape.num_kv_heads, self.shape.head_dim, seed=1)
        return {"key_cache": key, "value_cache": key.flip(0).contiguous()}

    def _cos_sin(self) -> torch.Tensor:
        frequencies = inverse_frequencies(self.shape.head_dim, theta=100000.0)
        return build_cos_sin_cache(frequencies, max_position=2048).to(self.device)

    # ------------------------------------------------------------------ layer ops
    def rms_norm(self, n: int) -> KernelCase:
        hidden = self.shape.hidden_size

        def inputs() -> Inputs:
            return {"x": self._random(n, hidden), "weight": self._random(hidden, seed=1), "residual": self._random(n, hidden, seed=2)}

        def run(function: Callable[..., torch.Tensor]) -> Op:
            return lambda i: (function(i["x"], i["weight"], eps=1e-5, residual=i["residual"]), i["residual"])

        size = self.dtype.itemsize * n * hidden
        return KernelCase("rms_norm", n, inputs, run(rms_norm_ref), self._triton(run(rms_norm)), 4 * size, 4.0 * n * hidden)

    def activation(self, n: int, name: str) -> KernelCase:
        size = self.shape.intermediate_size
        function, reference = (silu_mul, silu_mul_ref) if name == "silu_mul" else (gelu_mul, gelu_mul_ref)

        def inputs() -> Inputs:
            return {"x": self._random(n, 2 * size)}

        variants = self._triton(lambda i: (function(i["x"]),))
        return KernelCase(name, n, inputs, lambda i: (reference(i["x"]),), variants, 3 * self.dtype.itemsize * n * size, 6.0 * n * size)

    def apply_rope(self, n: int) -> KernelCase:
        s = self.shape

        def inputs() -> Inputs:
            return {
                "query": self._random(n, s.num_heads, s.head_dim),
                "key": self._random(n, s.num_kv_heads, s.head_dim, seed=1),
                "positions": self._int([(7 * row) % 2048 for row in range(n)], torch.int64),
                "cos_sin_cache": self._cos_sin(),
            }

        def run(function: Callable[..., None]) -> Op:
            def op(i: Inputs) -> tuple[torch.Tensor, ...]:
                function(i["query"], i["key"], positions=i["positions"], cos_sin_cache=i["cos_sin_cache"])
                return i["query"], i["key"]

            return op

        elements = n * (s.num_heads + s.num_kv_heads) * s.head_dim
        variants = self._triton(run(apply_rope))
        return KernelCase("apply_rope", n, inputs, run(apply_rope_ref), variants, 2 * self.dtype.itemsize * elements, 3.0 * elements)

    def reshape_and_cache(self, n: int) -> KernelCase:
        s = self.shape

        def inputs() -> Inputs:
            key, value = (self._random(n, s.num_kv_heads, s.head_dim, seed=seed) for seed in (2, 3))
            return {"key": key, "value": value, "slot_mapping": self._slots(n), **self._cache(n // BLOCK_SIZE + 2)}

        def run(function: Callable[..., None]) -> Op:
            def op(i: Inputs) -> tuple[torch.Tensor, ...]:
                caches = {name: i[name] for name in ("key_cache", "value_cache", "slot_mapping")}
                function(i["key"], i["value"], **caches)
                return i["key_cache"], i["value_cache"]

            return op

        size = self.dtype.itemsize * n * s.num_kv_heads * s.head_dim
        return KernelCase("reshape_and_cache", n, inputs, run(reshape_and_cache_ref), self._triton(run(reshape_and_cache), 0.0), 4 * size)

    def _slots(self, n: int) -> torch.Tensor:
        return self._int([BLOCK_SIZE + row for row in range(n)], torch.int64)

    def qk_norm_rope_cache(self, n: int) -> KernelCase:
        s = self.shape
        width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim

        def inputs() -> Inputs:
            return {
                "qkv": self._random(n, width),
                "positions": self._int([(7 * row) % 2048 for row in range(n)], torch.int64),
                "cos_sin_cache": self._cos_sin(),
                "slot_mapping": self._slots(n),
                **self._cache(n // BLOCK_SIZE + 2),
            }

        def run(function: Callable[..., torch.Tensor]) -> Op:
            def op(i: Inputs) -> tuple[torch.Tensor, ...]:
                rest = {name: value for name, value in i.items() if name != "qkv"}
                return function(i["qkv"], num_heads=s.num_heads, **rest), i["key_cache"], i["value_cache"]

            return op

        size = self.dtype.itemsize * n * width
        return KernelCase("qk_norm_rope_cache", n, inputs, run(qk_norm_rope_cache_ref), self._triton(run(qk_norm_rope_cache)), 2 * size)

    # ------------------------------------------------------------------ attention
    def paged_attention(self, n: int) -> KernelCase:
        """`n` requests that decode, each over `CONTEXT` cached positions."""
        s = self.shape
        blocks = CONTEXT // BLOCK_SIZE
        size = 2 * n * CONTEXT * s.num_kv_heads * s.head_dim * self.dtype.itemsize

        def inputs() -> Inputs:
            order = torch.randperm(n * blocks, generator=torch.Generator().manual_seed(5))
            return {
                "query": self._random(n, s.num_heads, s.head_dim),
                **self._cache(n * blocks),
                "block_table": order.view(n, blocks).to(self.device, torch.int32),
                "seq_lens": self._int([CONTEXT] * n),
                "query_start_loc": self._int(list(range(n + 1))),
            }

        def reference(i: Inputs) -> tuple[torch.Tensor, ...]:
            rest = {name: value for name, value in i.items() if name != "query"}
            return (paged_attention_ref(i["query"], scale=s.head_dim**-0.5, **rest),)

        def run(i: Inputs) -> tuple[torch.Tensor, ...]:
            rest = {name: value for name, value in i.items() if name != "query"}
            return (paged_attention(i["query"], scale=s.head_dim**-0.5, max_query_len=1, max_seq_len=CONTEXT, **rest),)

        flops = 4.0 * n * CONTEXT * s.num_heads * s.head_dim
        return KernelCase(f"paged_attention ctx {CONTEXT}", n, inputs, reference, self._triton(run), size, flops)

    def zero_blocks(self, n: int) -> KernelCase:
        def inputs() -> Inputs:
            return {"cache": self._cache(n + 1)["key_cache"], "block_ids": self._int(list(range(1, n + 1)))}

        def run(function: Callable[..., None]) -> Op:
            def op(i: Inputs) -> tuple[torch.Tensor, ...]:
                function(i["cache"], i["block_ids"])
                return (i["cache"],)

            return op

        size = n * BLOCK_SIZE * self.shape.num_kv_heads * self.shape.head_dim * self.dtype.itemsize
        return KernelCase("zero_blocks", n, inputs, run(zero_blocks_ref), self._triton(run(zero_blocks), 0.0), size)

    # ------------------------------------------------------------------ sampling
    def _logits(self, n: int) -> torch.Tensor:
        return self._random(n, self.shape.vocab_size, dtype=torch.float32) * 4

    def _per_row(self, n: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((n,), value, dtype=dtype, device=self.device)

    def apply_penalties(self, n: int) -> KernelCase:
        vocab = self.shape.vocab_size

        def inputs() -> Inputs:
            return {
                "logits": self._logits(n),
                "prompt_mask": (self._random(n, vocab, seed=1) > 2).to(torch.int8),
                "output_counts": (self._random(n, vocab, seed=2) > 3).to(torch.int32),
                "idx_mapping": self._int(list(range(n))),
                **{name: self._per_row(n, value) for name, value in (("repetition", 1.1), ("frequency", 0.2), ("presence", 0.1))},
            }

        def run(function: Callable[..., torch.Tensor]) -> Op:
            return lambda i: (function(i["logits"], **{name: value for name, value in i.items() if name != "logits"}),)

        return KernelCase("apply_penalties", n, inputs, run(apply_penalties_ref), self._triton(run(apply_penalties), 1e-5), 13 * n * vocab)

    def top_k_top_p(self, n: int) -> KernelCase:
        def inputs() -> Inputs:
            rows = (("temperature", 0.8), ("top_p", 0.9), ("min_p", 0.01))
            return {"logits": self._logits(n), "top_k": self._per_row(n, 50, torch.int32), **{k: self._per_row(n, v) for k, v in rows}}

        def run(function: Callable[..., torch.Tensor]) -> Op:
            def op(i: Inputs) -> tuple[torch.Tensor, ...]:
                kept = function(i["logits"], **{name: value for name, value in i.items() if name != "logits"})
                return (kept.isfinite().float(),)

            return op

        size = 8 * n * self.shape.vocab_size
        return KernelCase("top_k_top_p", n, inputs, run(top_k_top_p_ref), self._triton(run(top_k_top_p), 0.0), size)

    def draw_tokens(self, n: int) -> KernelCase:
        def inputs() -> Inputs:
            return {
                "logits": self._logits(n),
                "temperature": self._per_row(n, 0.8),
                "seeds": self._int(list(range(n)), torch.int64),
                "indices": self._int([3] * n),
            }

        def run(function: Callable[..., torch.Tensor]) -> Op:
            return lambda i: (function(i["logits"], **{name: value for name, value in i.items() if name != "logits"}).float(),)

        size = 4 * n * self.shape.vocab_size
        return KernelCase("draw_tokens", n, inputs, run(draw_tokens_ref), self._triton(run(draw_tokens), 0.0), size)

    def token_logprobs(self, n: int) -> KernelCase:
        def inputs() -> Inputs:
            ids = torch.arange(n * 21, device=self.device).view(n, 21) % self.shape.vocab_size
            return {"logits": self._logits(n), "token_ids": ids}

        def run(function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Op:
            return lambda i: function(i["logits"], i["token_ids"])

        size = 4 * n * self.shape.vocab_size
        return KernelCase("token_logprobs", n, inputs, run(token_logprobs_ref), self._triton(run(token_logprobs), 1e-5), size)

    # ------------------------------------------------------------------ matrix products
    def linear(self, n: int) -> KernelCase:
        """The product gate_up, the largest one of a layer."""
        rows, columns = 2 * self.shape.intermediate_size, self.shape.hidden_size

        def inputs() -> Inputs:
            return {"x": self._random(n, columns), "weight": self._random(rows, columns, seed=1) * 0.05}

        size = self.dtype.itemsize * (rows * columns + n * (rows + columns))
        return KernelCase("linear gate_up", n, inputs, lambda i: (F.linear(i["x"], i["weight"]),), {}, size, 2.0 * n * rows * columns)

    def all(self, n: int) -> Iterator[KernelCase]:
        """Every op at `n` tokens (requests, for the ops that have one row a request)."""
        yield self.linear(n)
        yield self.rms_norm(n)
        yield self.activation(n, "silu_mul")
        yield self.activation(n, "gelu_mul")
        yield self.apply_rope(n)
        yield self.reshape_and_cache(n)
        yield self.qk_norm_rope_cache(n)
        yield self.paged_attention(n)
        yield self.zero_blocks(n)
        yield self.apply_penalties(n)
        yield self.top_k_top_p(n)
        yield self.draw_tokens(n)
        yield self.token_logprobs(n)


def all_cases(device: torch.device, num_tokens: int) -> list[KernelCase]:
    """Every op, with Triton's variants on a GPU and the native ones on a CPU that has them."""
    factory = CaseFactory.for_device(device)
    cases = list(factory.all(num_tokens))
    if device.type == "cpu":
        natives = native_variants(factory.shape)
        cases[1:1] = native_cases(factory.shape, num_tokens)
        cases = [replace(case, variants={**case.variants, **natives.get(case.op, {})}) for case in cases]
    return cases
