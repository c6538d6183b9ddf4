"""Log-probabilities and ranks of chosen tokens, without writing out a log-softmax of the whole vocabulary."""

from __future__ import annotations

import torch

from aioengine_kernels._triton import dispatcher, jit, next_power_of_2, tl

_BLOCK = 8192  # with 32 warps 32 KB of loads in flight, about what one SM needs to draw on L2 at full rate


@jit
def _as_logit(x):
    """NaN and +inf count as -inf."""
    return tl.where(x < float("inf"), x, float("-inf"))


@jit
def _token_logprobs_kernel(
    logits_ptr,
    token_ids_ptr,
    logprobs_ptr,
    ranks_ptr,
    logits_stride,
    token_ids_stride,
    vocab_size,
    num_tokens_per_row,
    TOKENS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    first_token = tl.load(token_ids_ptr + row * token_ids_stride)
    first_logit = _as_logit(tl.load(row_ptr + first_token))
    lowest = -3.4e38  # finite, so that a lane of -inf logits never computes inf - inf
    maximum = tl.full((BLOCK,), lowest, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    above = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, vocab_size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = _as_logit(tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf")))
        new_maximum = tl.maximum(maximum, x)
        total = total * tl.exp(maximum - new_maximum) + tl.exp(x - new_maximum)
        maximum = new_maximum
        above += (x > first_logit).to(tl.int32)
    largest = tl.max(maximum, 0)
    log_sum = largest + tl.log(tl.sum(total * tl.exp(maximum - largest), 0))
    column = tl.arange(0, TOKENS_PADDED)
    mask = column < num_tokens_per_row
    token_id = tl.load(token_ids_ptr + row * token_ids_stride + column, mask=mask, other=0)
    logit = _as_logit(tl.load(row_ptr + token_id, mask=mask, other=0.0))
    tl.store(logprobs_ptr + row * num_tokens_per_row + column, tl.where(logit > float("-inf"), logit - log_sum, logit), mask=mask)
    tl.store(ranks_ptr + row, tl.sum(above, 0) + 1)


def token_logprobs_ref(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log_softmax(logits) at the given tokens, and the rank of each row's first token.

    logits: [n, vocab_size] float32. token_ids: [n, m] int32 or int64 with every id in [0, vocab_size): the sampled token
    first, then the likeliest ones (`torch.topk` of the logits finds them by selection, not by sorting).
    Returns logprobs [n, m] float32 and ranks [n] int32; a rank is 1 + the number of tokens with a larger logit. NaN and +inf
    count as -inf.
    """
    ids = token_ids.long()
    logits = logits.masked_fill(~(logits < float("inf")), float("-inf"))
    # A row of nothing but -inf has the log-probability -inf everywhere.
    logprobs = logits.log_softmax(-1).gather(1, ids).masked_fill(logits.gather(1, ids) == float("-inf"), float("-inf"))
    ranks = (logits > logits.gather(1, ids[:, :1])).sum(1) + 1
    return logprobs, ranks.to(torch.int32)


def token_logprobs_triton(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel of `token_logprobs`; the arguments are those of `token_logprobs`."""
    num_rows, vocab_size = logits.shape
    per_row = token_ids.shape[1]
    logprobs = torch.empty(num_rows, per_row, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows > 0:
        _token_logprobs_kernel[(num_rows,)](
            logits,
            token_ids,
            logprobs,
            ranks,
            logits.stride(0),
            token_ids.stride(0),
            vocab_size,
            per_row,
            TOKENS_PADDED=next_power_of_2(per_row),
            BLOCK=_BLOCK,
            num_warps=32,
        )
    return logprobs, ranks


token_logprobs = dispatcher(triton=token_logprobs_triton, reference=token_logprobs_ref)
