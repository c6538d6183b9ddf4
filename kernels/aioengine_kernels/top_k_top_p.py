"""Temperature-aware min-p, top-k and top-p without sorting the vocabulary.

Each of the three keeps the tokens whose logit is at least some threshold, so only the threshold is needed. It is found on the
bit patterns: read as integers with the sign folded, floats order like their values, so a search over at most 2^32 integers
ends at the exact k-th largest logit, where a search over float values only comes near it. Of tokens that tie at the threshold the
first stay, so that exactly as many are kept as the filter says. A pass over the row weighs three
thresholds at once (the loads, not the compares, take the time), which settles two bits: at most 17 passes, and fewer as the
search stops when one token is left between its bounds. For normally distributed logits of 128256 tokens top-k of 50 takes
about 9 passes and top-p of 0.9 about 12.

Whatever the logits hold, a row ends: NaN and +inf count as -inf in every pass, and the passes are counted.
"""

from __future__ import annotations

import torch

from aioengine_kernels._triton import HAS_TRITON, dispatcher, jit, tl

_BLOCK = 8192  # with 32 warps 32 KB of loads in flight, about what one SM needs to draw on L2 at full rate

_MAX_PASSES = tl.constexpr(18) if HAS_TRITON else 18  # 2^32 / 4^16 = 1, and one or two for the rounding of the steps


@jit
def _load_logits(row_ptr, token, vocab_size):
    """The logits of the tokens; -inf past the vocabulary, and for what is no logit: NaN and +inf."""
    x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))
    return tl.where(x < float("inf"), x, float("-inf"))


@jit
def _ordered_bits(x):
    """float32 -> int32 that orders like the value."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _weigh(row_ptr, vocab_size, floor, low, high, t1, t2, t3, maximum, inverse_temperature, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """One pass: the weight at or above each threshold and the floor, and how many tokens lie in [low, high).

    A token weighs 1, or its mass exp((x - max) / T). All bounds are ordered bits.
    """
    w1 = tl.zeros((BLOCK,), tl.float32)
    w2 = tl.zeros((BLOCK,), tl.float32)
    w3 = tl.zeros((BLOCK,), tl.float32)
    between = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, vocab_size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = _load_logits(row_ptr, token, vocab_size)
        bits = _ordered_bits(x)
        weight = tl.full((BLOCK,), 1.0, tl.float32)
        if BY_MASS:  # -inf has no mass at any temperature, where -inf x 0 would be NaN
            weight = tl.where(x > float("-inf"), tl.exp((x - maximum) * inverse_temperature), 0.0)
        weight = tl.where(bits >= floor, weight, 0.0)
        w1 += tl.where(bits >= t1, weight, 0.0)
        w2 += tl.where(bits >= t2, weight, 0.0)
        w3 += tl.where(bits >= t3, weight, 0.0)
        between += ((bits >= low) & (bits < high)).to(tl.int32)
    return tl.sum(w1, 0), tl.sum(w2, 0), tl.sum(w3, 0), tl.sum(between, 0)


@jit
def _find_threshold(row_ptr, vocab_size, floor, ceiling, target, maximum, inverse_temperature, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Ordered bits t in [floor, ceiling) for which {bits >= t} is the smallest such set of at least the target weight; and whether
    all tokens at t are needed for that, as far as is known.

    Between passes weight(low) >= target > weight(high), unless even the floor falls short; then the floor is the answer.
    """
    low = floor
    high = ceiling
    passes = 0
    exact = high < low
    while (high - low > 1) & (passes < _MAX_PASSES):
        passes += 1
        step = tl.maximum((high - low) // 4, 1)
        t1 = low + step
        t2 = t1 + step
        t3 = t2 + step
        w1, w2, w3, between = _weigh(
            row_ptr,
            vocab_size,
            floor.to(tl.int32),
            low.to(tl.int32),
            high.to(tl.int32),
            t1.to(tl.int32),
            t2.to(tl.int32),
            t3.to(tl.int32),
            maximum,
            inverse_temperature,
            BY_MASS,
            BLOCK,
        )
        low = tl.where(w3 >= target, t3, tl.where(w2 >= target, t2, tl.where(w1 >= target, t1, low)))
        cut = tl.where(w1 < target, t1, tl.where(w2 < target, t2, tl.where(w3 < target, t3, high)))
        # Settled: only one token was left between the bounds, or a threshold has exactly the wanted number above it.
        settled = between <= 1
        if not BY_MASS:
            settled = settled | (w1 == target) | (w2 == target) | (w3 == target)
        high = tl.where(settled, low + 1, tl.minimum(cut, high))
        exact = settled
    return low, exact


@jit
def _mass(bits, maximum, inverse_temperature):
    """exp((x - max) / T) of the logit with these ordered bits."""
    x = _ordered_bits(bits.to(tl.float32, bitcast=True)).to(tl.float32, bitcast=True)  # folding the sign twice undoes it
    return tl.exp((x - maximum) * inverse_temperature)


@jit
def _ties_to_keep(row_ptr, vocab_size, bits, target, maximum, inverse_temperature, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the tokens at the threshold `bits` the set needs, with all above it, to reach the target weight."""
    _, above, _, ties = _weigh(
        row_ptr, vocab_size, bits, bits, bits + 1, bits, bits + 1, bits + 1, maximum, inverse_temperature, BY_MASS, BLOCK
    )
    needed = target - above
    if BY_MASS:
        needed = tl.ceil(needed / _mass(bits, maximum, inverse_temperature))
    return tl.where(needed >= ties, ties, tl.where(needed >= 1.0, needed, 1.0).to(tl.int32))


@jit
def _top_k_top_p_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    logits_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    if (temperature == 0.0) | ((not has_top_k) & (top_p >= 1.0) & (min_p <= 0.0)):
        return
    row_ptr = logits_ptr + row * logits_stride
    lanes = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    smallest = tl.full((BLOCK,), float("inf"), tl.float32)
    for first in tl.range(0, vocab_size, BLOCK):
        token = first + lanes
        x = _load_logits(row_ptr, token, vocab_size)
        largest = tl.maximum(largest, x)
        smallest = tl.minimum(smallest, tl.where(token < vocab_size, x, float("inf")))
    maximum = tl.max(largest, 0)
    if maximum == float("-inf"):  # nothing to choose from
        return
    floor = _ordered_bits(tl.min(smallest, 0)).to(tl.int64)
    ceiling = _ordered_bits(maximum).to(tl.int64) + 1
    inverse_temperature = tl.minimum(1.0 / temperature, 3.0e38)  # finite: the likeliest token's 0 x inf would be NaN
    if min_p > 0.0:
        floor = tl.maximum(floor, _ordered_bits(maximum + temperature * tl.log(min_p)).to(tl.int64))
    num_ties = tl.full((), 2147483647, tl.int32)  # how many of the tokens at the floor stay: all
    if has_top_k:
        k = top_k.to(tl.float32)
        floor, exact = _find_threshold(row_ptr, vocab_size, floor, ceiling, k, maximum, inverse_temperature, False, BLOCK)
        if exact == 0:
            num_ties = _ties_to_keep(row_ptr, vocab_size, floor.to(tl.int32), k, maximum, inverse_temperature, False, BLOCK)
    if top_p < 1.0:
        held = floor.to(tl.int32)
        mass, above, _, ties = _weigh(
            row_ptr, vocab_size, held, held, held + 1, held, held + 1, held + 1, maximum, inverse_temperature, True, BLOCK
        )
        if ties > num_ties:
            mass = above + num_ties.to(tl.float32) * _mass(held, maximum, inverse_temperature)
        target = top_p * mass
        floor, exact = _find_threshold(row_ptr, vocab_size, floor, ceiling, target, maximum, inverse_temperature, True, BLOCK)
        limit = tl.where(floor.to(tl.int32) == held, num_ties, 2147483647)  # what top-k left, where it is the same threshold
        num_ties = limit
        if exact == 0:
            wanted = _ties_to_keep(row_ptr, vocab_size, floor.to(tl.int32), target, maximum, inverse_temperature, True, BLOCK)
            num_ties = tl.minimum(wanted, limit)
    seen = tl.zeros((), tl.int32)
    for first in tl.range(0, vocab_size, BLOCK):
        token = first + lanes
        mask = token < vocab_size
        bits = _ordered_bits(_load_logits(row_ptr, token, vocab_size))
        removed = bits < floor.to(tl.int32)
        if num_ties < 2147483647:
            is_tie = (bits == floor.to(tl.int32)).to(tl.int32)
            removed = removed | ((is_tie != 0) & (seen + tl.cumsum(is_tie, 0) > num_ties))
            seen += tl.sum(is_tie, 0)
        tl.store(row_ptr + token, tl.full((BLOCK,), float("-inf"), tl.float32), mask=mask & removed)


def top_k_top_p_ref(
    logits: torch.Tensor,  # [n, vocab_size] float32, changed in place; -inf marks a token that must not be sampled
    *,
    temperature: torch.Tensor,  # [n] float32
    top_k: torch.Tensor,  # [n] int32; 0, -1 or at least vocab_size keeps all
    top_p: torch.Tensor,  # [n] float32 in (0, 1]
    min_p: torch.Tensor,  # [n] float32 in [0, 1]
) -> torch.Tensor:
    """Set the logits of tokens that a row's filters drop to -inf, in place, and return them.

    Probabilities are softmax(logits / temperature), but the logits themselves stay unscaled: `draw_tokens` scales
    them. In this order: min-p drops tokens less likely than min_p x the likeliest; top-k keeps the k likeliest; top-p
    keeps the smallest set of the rest whose share reaches top_p. Of equal ones the lowest ids stay. The likeliest token always stays.
    Greedy rows (temperature 0) and rows whose filters are neutral are left alone. NaN and +inf count as -inf; a row of nothing
    else is left alone.
    """
    for row, (t, k, p, floor) in enumerate(zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)):
        if t == 0:
            continue
        x = logits[row]
        x = x.masked_fill(~(x < float("inf")), float("-inf"))
        if x.max() == float("-inf"):
            continue
        if floor > 0:
            x = x.masked_fill(x < x.max() + t * torch.log(torch.tensor(floor, dtype=x.dtype)), float("-inf"))
        values, token_ids = x.sort(descending=True, stable=True)
        num_kept = k if 0 < k < x.shape[0] else x.shape[0]
        if p < 1:
            mass = (values[:num_kept].double() / t).softmax(-1).cumsum(-1)
            num_kept = min(int((mass < p).sum()) + 1, num_kept)
        x[token_ids[num_kept:]] = float("-inf")
        logits[row] = x
    return logits


def top_k_top_p_triton(
    logits: torch.Tensor, *, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Launch the kernel of `top_k_top_p`; the arguments are those of `top_k_top_p`."""
    num_rows, vocab_size = logits.shape
    if num_rows > 0:
        _top_k_top_p_kernel[(num_rows,)](logits, temperature, top_k, top_p, min_p, logits.stride(0), vocab_size, BLOCK=_BLOCK, num_warps=32)
    return logits


top_k_top_p = dispatcher(triton=top_k_top_p_triton, reference=top_k_top_p_ref)
