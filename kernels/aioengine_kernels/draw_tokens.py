"""Drawing a token a row: the inverse of the cumulative distribution, in the order of the token ids, at one uniform number.

The number is a function of the request's seed and of the index of the output token alone (`philox.uniform`), so a request's tokens
do not depend on its batch mates, on its row, or on how the vocabulary is cut over programs. The host's sampler draws from the same
function at the same number: a seed means the same tokens on every device, but for logits at which the rounding of float32 decides.
"""

from __future__ import annotations

import torch

from aioengine_kernels._triton import cdiv, dispatcher, jit, next_power_of_2, tl
from aioengine_kernels.inverse_cdf import inverse_cdf
from aioengine_kernels.philox import uniform

_BLOCK = 2048


@jit
def _load_logits(row_ptr, token, vocab_size):
    """-inf past the vocabulary, and for what is no logit: a maximum over NaN could point past the vocabulary."""
    x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
    return tl.where(x < float("inf"), x, float("-inf"))


@jit
def _weights(x, maximum, temperature):
    """exp(x / T - max / T) as float64, with the divisions that the host makes, but where those overflow."""
    scaled = tl.div_rn(maximum, temperature)
    is_finite = (scaled < float("inf")) & (scaled > float("-inf"))
    exponent = tl.where(is_finite, tl.div_rn(x, temperature) - scaled, tl.div_rn(x - maximum, temperature))
    return tl.where(x > float("-inf"), tl.exp(exponent), 0.0).to(tl.float64)


@jit
def _weigh_chunks_kernel(
    logits_ptr,
    temperature_ptr,
    best_value_ptr,
    best_token_ptr,
    mass_ptr,
    logits_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    x = _load_logits(logits_ptr + row * logits_stride, chunk * BLOCK + tl.arange(0, BLOCK), vocab_size)
    temperature = tl.load(temperature_ptr + row)
    value, lane = tl.max(x, 0, return_indices=True)
    place = row * tl.num_programs(1) + chunk
    tl.store(best_value_ptr + place, value)
    tl.store(best_token_ptr + place, chunk * BLOCK + lane)
    if temperature > 0.0:
        tl.store(mass_ptr + place, tl.sum(_weights(x, value, temperature), 0))


@jit
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    indices_ptr,
    best_value_ptr,
    best_token_ptr,
    mass_ptr,
    idx_mapping_ptr,
    out_ptr,
    last_sampled_ptr,
    logits_stride,
    vocab_size,
    num_chunks,
    SCATTER: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_PADDED)
    places = row * num_chunks + chunks
    value = tl.load(best_value_ptr + places, mask=chunks < num_chunks, other=float("-inf"))
    token = tl.load(best_token_ptr + row * num_chunks + tl.argmax(value, 0))
    temperature = tl.load(temperature_ptr + row)
    maximum = tl.max(value, 0)
    if (temperature > 0.0) & (maximum > float("-inf")):
        index = tl.load(indices_ptr + row).to(tl.int32)
        zero = index * 0
        high, low, _, _ = tl.philox(tl.load(seeds_ptr + row), index, zero, zero, zero)
        # 27 and 26 bits make the 53 bits of a float64's mantissa.
        number = ((high >> 5).to(tl.float64) * 67108864.0 + (low >> 6).to(tl.float64)) * 1.1102230246251565e-16
        mass = tl.load(mass_ptr + places, mask=chunks < num_chunks, other=0.0)
        share = _weights(value, maximum, temperature)
        cumulative = tl.cumsum(mass * share, 0)
        target = number * tl.max(cumulative, 0)
        chunk = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), num_chunks - 1)
        before = tl.sum(tl.where(chunks == chunk - 1, cumulative, 0.0), 0)
        scale = tl.sum(tl.where(chunks == chunk, share, 0.0), 0)
        best = tl.max(tl.where(chunks == chunk, value, float("-inf")), 0)
        lanes = tl.arange(0, BLOCK)
        x = _load_logits(logits_ptr + row * logits_stride, chunk * BLOCK + lanes, vocab_size)
        weights = _weights(x, best, temperature)
        lane = tl.sum((before + scale * tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
        # Sums of another order may end a rounding short of the target: then it is the last token that has any weight.
        last = tl.max(tl.where(weights > 0.0, lanes, 0), 0)
        token = (chunk * BLOCK + tl.minimum(lane, last)).to(tl.int32)
    tl.store(out_ptr + row, token.to(out_ptr.dtype.element_ty))
    if SCATTER:
        slot = tl.load(idx_mapping_ptr + row)
        tl.store(last_sampled_ptr + slot, token, mask=slot >= 0)


def draw_tokens_ref(
    logits: torch.Tensor,  # [n, vocab_size] float32, unscaled; -inf is never drawn
    *,
    temperature: torch.Tensor,  # [n] float32; 0 is greedy
    seeds: torch.Tensor,  # [n] int64: the request's 64-bit seed, as two's complement
    indices: torch.Tensor,  # [n] int32 or int64 below 2^31: which output token of the request this is
    idx_mapping: torch.Tensor | None = None,  # [n] int32: the slot to report the token to; negative: none
    last_sampled_tokens: torch.Tensor | None = None,  # [max_num_reqs] int32
) -> torch.Tensor:
    """Draw one token a row from softmax(logits / temperature); returns [n] int32. NaN and +inf count as -inf, and a row of
    nothing else gives token 0: whatever the logits, the tokens are in the vocabulary.

    With both `idx_mapping` and `last_sampled_tokens` the token is also stored at its slot, where the next step's
    `batch_inputs` reads it. A greedy row takes the first of equal maxima.
    """
    logits = logits.masked_fill(~(logits < float("inf")), float("-inf"))
    tokens = logits.argmax(-1)
    rows = ((temperature > 0) & (logits.amax(-1) > float("-inf"))).nonzero()[:, 0]
    if len(rows):
        numbers = uniform(seeds[rows].cpu().numpy().view("uint64"), indices[rows].cpu().numpy())
        chosen, divisor = logits[rows], temperature[rows, None]
        scaled, maximum = chosen / divisor, chosen.amax(-1, keepdim=True)
        scaled = torch.where((maximum / divisor).isfinite(), scaled, (chosen - maximum) / divisor)
        tokens[rows] = inverse_cdf(scaled.softmax(-1), torch.from_numpy(numbers).to(logits.device))
    if idx_mapping is not None and last_sampled_tokens is not None:
        known = idx_mapping >= 0
        last_sampled_tokens[idx_mapping[known].long()] = tokens[known].to(last_sampled_tokens.dtype)
    return tokens.to(torch.int32)


def draw_tokens_triton(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    indices: torch.Tensor,
    idx_mapping: torch.Tensor | None = None,
    last_sampled_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernels of `draw_tokens`; the arguments are those of `draw_tokens`."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return tokens
    num_chunks = cdiv(vocab_size, _BLOCK)
    best_value = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    mass = torch.empty(num_rows, num_chunks, dtype=torch.float64, device=logits.device)
    _weigh_chunks_kernel[(num_rows, num_chunks)](
        logits, temperature, best_value, best_token, mass, logits.stride(0), vocab_size, BLOCK=_BLOCK, num_warps=8
    )
    scatter = idx_mapping is not None and last_sampled_tokens is not None
    _draw_kernel[(num_rows,)](
        logits,
        temperature,
        seeds,
        indices,
        best_value,
        best_token,
        mass,
        idx_mapping if scatter else tokens,
        tokens,
        last_sampled_tokens if scatter else tokens,
        logits.stride(0),
        vocab_size,
        num_chunks,
        SCATTER=scatter,
        CHUNKS_PADDED=next_power_of_2(num_chunks),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return tokens


draw_tokens = dispatcher(triton=draw_tokens_triton, reference=draw_tokens_ref)
