"""Sampling by the Gumbel arg-max: argmax_v(logits_v + T g_v) is distributed as softmax(logits / T), for independent Gumbel g_v.

No normalization and no cumulative sum, so the vocabulary is cut over programs; and at T = 0 it is the plain arg-max.
The noise of token v is a function of the request's seed, the index of the output token and v alone: output v % 4 of
Philox4x32-10 (Salmon et al., 2011) with key `seed` and counter (v // 4, index, 0, 0). So a request's tokens do not depend on
its batch mates, its row, or how the vocabulary is cut.
"""

from __future__ import annotations

import torch

from aioengine_kernels._triton import cdiv, jit, next_power_of_2, tl, use_triton

_BLOCK = 2048
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


@jit
def _gumbel_noise(seed, index, token_quad, BLOCK: tl.constexpr):
    """[BLOCK] Gumbel noise of the tokens 4 x token_quad[0], ...; token_quad: [BLOCK // 4] int32."""
    zero = token_quad * 0
    r0, r1, r2, r3 = tl.philox(seed, token_quad, zero + index, zero, zero)
    bits = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (BLOCK,))
    # u in (0, 1): small u, which make large noise, keep float32's relative precision; the largest stays below 1.
    u = tl.minimum(bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)
    exponential = tl.where(u < 1e-3, u * (1.0 + u * (0.5 + u * 0.33333334)), -tl.log(1.0 - u))  # -log1p(-u)
    return -tl.log(exponential)


@jit
def _gumbel_argmax_kernel(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    indices_ptr,
    best_value_ptr,
    best_token_ptr,
    logits_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
    # NaN and +inf are no logits. A maximum over NaN could point past the vocabulary, and that token would be looked up.
    x = tl.where(x < float("inf"), x, float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        quad = chunk * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        noise = _gumbel_noise(tl.load(seeds_ptr + row), tl.load(indices_ptr + row).to(tl.int32), quad, BLOCK)
        x = tl.where(x > float("-inf"), x + temperature * noise, x)  # -inf + inf would be NaN
    value, lane = tl.max(x, 0, return_indices=True)
    tl.store(best_value_ptr + row * tl.num_programs(1) + chunk, value)
    tl.store(best_token_ptr + row * tl.num_programs(1) + chunk, chunk * BLOCK + lane)


@jit
def _join_chunks_kernel(
    best_value_ptr,
    best_token_ptr,
    idx_mapping_ptr,
    out_ptr,
    last_sampled_ptr,
    num_chunks,
    SCATTER: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_PADDED)
    value = tl.load(best_value_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    best = tl.argmax(value, 0)
    token = tl.load(best_token_ptr + row * num_chunks + best)
    tl.store(out_ptr + row, token.to(out_ptr.dtype.element_ty))
    if SCATTER:
        slot = tl.load(idx_mapping_ptr + row)
        tl.store(last_sampled_ptr + slot, token, mask=slot >= 0)


def _philox_quads(seed: int, index: int, num_quads: int) -> torch.Tensor:
    """[num_quads, 4] int64: the Philox4x32-10 outputs of counters (0 .. num_quads - 1, index, 0, 0)."""
    c0 = torch.arange(num_quads, dtype=torch.int64)
    c1, c2, c3 = torch.full_like(c0, index & _MASK), torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high2, low2 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=1)


def _multiply(values: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of values x factor, for unsigned 32-bit numbers kept in int64."""
    low = (values & 0xFFFF) * factor
    high = (values >> 16) * factor + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def gumbel_noise_ref(seed: int, index: int, vocab_size: int) -> torch.Tensor:
    """[vocab_size] float64: the Gumbel noise of one request's output token `index`."""
    bits = _philox_quads(seed, index, cdiv(vocab_size, 4)).flatten()[:vocab_size].double()
    u = (bits * 2.0**-32 + 2.0**-33).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))


def gumbel_argmax_ref(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    indices: torch.Tensor,
    idx_mapping: torch.Tensor | None = None,
    last_sampled_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gumbel_argmax` in torch."""
    logits = logits.masked_fill(~(logits < float("inf")), float("-inf"))
    tokens = logits.argmax(-1)
    for row, (t, seed, index) in enumerate(zip(temperature.tolist(), seeds.tolist(), indices.tolist(), strict=True)):
        if t > 0:
            noise = gumbel_noise_ref(seed, index, logits.shape[1]).to(logits.device)
            tokens[row] = (logits[row].double() + t * noise).argmax()
    if idx_mapping is not None and last_sampled_tokens is not None:
        known = idx_mapping >= 0
        last_sampled_tokens[idx_mapping[known].long()] = tokens[known].to(last_sampled_tokens.dtype)
    return tokens.to(torch.int32)


def gumbel_argmax_triton(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    indices: torch.Tensor,
    idx_mapping: torch.Tensor | None = None,
    last_sampled_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel of `gumbel_argmax`; the arguments are those of `gumbel_argmax`."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return tokens
    num_chunks = cdiv(vocab_size, _BLOCK)
    best_value = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    _gumbel_argmax_kernel[(num_rows, num_chunks)](
        logits, temperature, seeds, indices, best_value, best_token, logits.stride(0), vocab_size, BLOCK=_BLOCK, num_warps=4
    )
    scatter = idx_mapping is not None and last_sampled_tokens is not None
    _join_chunks_kernel[(num_rows,)](
        best_value,
        best_token,
        idx_mapping if scatter else tokens,
        tokens,
        last_sampled_tokens if scatter else tokens,
        num_chunks,
        SCATTER=scatter,
        CHUNKS_PADDED=next_power_of_2(num_chunks),
        num_warps=1,
    )
    return tokens


def gumbel_argmax(
    logits: torch.Tensor,  # [n, vocab_size] float32, unscaled; -inf is never drawn
    *,
    temperature: torch.Tensor,  # [n] float32; 0 is greedy
    seeds: torch.Tensor,  # [n] int64: the request's 64-bit seed, as two's complement
    indices: torch.Tensor,  # [n] int32 or int64: which output token of the request this is
    idx_mapping: torch.Tensor | None = None,  # [n] int32: the slot to report the token to; negative: none
    last_sampled_tokens: torch.Tensor | None = None,  # [max_num_reqs] int32
) -> torch.Tensor:
    """Draw one token a row from softmax(logits / temperature); returns [n] int32. NaN and +inf count as -inf, and a row of
    nothing else gives token 0: whatever the logits, the tokens are in the vocabulary.

    With both `idx_mapping` and `last_sampled_tokens` the token is also stored at its slot, where the next step's
    `batch_inputs` reads it. A greedy row takes the first of equal maxima.
    """
    sample = gumbel_argmax_triton if use_triton(logits) else gumbel_argmax_ref
    return sample(
        logits,
        temperature=temperature,
        seeds=seeds,
        indices=indices,
        idx_mapping=idx_mapping,
        last_sampled_tokens=last_sampled_tokens,
    )
