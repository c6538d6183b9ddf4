"""Repetition, frequency and presence penalties, applied to a step's logits from per-slot token counts."""

from __future__ import annotations

import torch

from aioengine_kernels._triton import cdiv, dispatcher, jit, tl

_BLOCK = 1024


@jit
def _apply_penalties_kernel(
    logits_ptr,
    prompt_mask_ptr,
    output_counts_ptr,
    idx_mapping_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    logits_stride,
    counts_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    presence = tl.load(presence_ptr + row)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    slot = tl.load(idx_mapping_ptr + row).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab_size
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=mask, other=0.0)
    count = tl.load(output_counts_ptr + slot * counts_stride + token, mask=mask, other=0)
    in_prompt = tl.load(prompt_mask_ptr + slot * counts_stride + token, mask=mask, other=0) != 0
    in_output = count > 0
    scaled = tl.where(logits > 0, logits / repetition, logits * repetition)
    logits = tl.where(in_prompt | in_output, scaled, logits)
    logits -= frequency * count.to(tl.float32) + tl.where(in_output, presence, 0.0)
    tl.store(logits_ptr + row * logits_stride + token, logits, mask=mask)


def apply_penalties_ref(
    logits: torch.Tensor,  # [n, vocab_size] float32, changed in place; a row stride divisible by 4 gives vector loads
    *,
    prompt_mask: torch.Tensor,  # [max_num_reqs, vocab_size] int8: not 0 where the prompt holds the token
    output_counts: torch.Tensor,  # [max_num_reqs, vocab_size] int32: how often the output holds the token
    idx_mapping: torch.Tensor,  # [n] int32: the slot of each row
    repetition: torch.Tensor,  # [n] float32, 1 is neutral
    frequency: torch.Tensor,  # [n] float32, 0 is neutral
    presence: torch.Tensor,  # [n] float32, 0 is neutral
) -> torch.Tensor:
    """Penalize tokens seen before, in place, and return the logits. Neutral rows are left alone.

    Repetition (Keskar et al., CTRL, 2019) divides positive and multiplies negative logits of tokens in the prompt or the output;
    frequency subtracts its value once an occurrence in the output, presence once if there is any.
    """
    slots = idx_mapping.long()
    counts = output_counts[slots]
    in_output = counts > 0
    factor = repetition.to(logits.dtype).unsqueeze(1)
    scaled = torch.where(logits > 0, logits / factor, logits * factor)
    result = torch.where((prompt_mask[slots] != 0) | in_output, scaled, logits)
    result = result - frequency.unsqueeze(1) * counts - presence.unsqueeze(1) * in_output
    return logits.copy_(result)


def apply_penalties_triton(
    logits: torch.Tensor,
    *,
    prompt_mask: torch.Tensor,
    output_counts: torch.Tensor,
    idx_mapping: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernel of `apply_penalties`; the arguments are those of `apply_penalties`."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return logits
    if prompt_mask.stride(0) != output_counts.stride(0):
        strides = prompt_mask.stride(0), output_counts.stride(0)
        raise ValueError(f"prompt_mask and output_counts must share a row stride, got {strides[0]} and {strides[1]}")
    _apply_penalties_kernel[(num_rows, cdiv(vocab_size, _BLOCK))](
        logits,
        prompt_mask,
        output_counts,
        idx_mapping,
        repetition,
        frequency,
        presence,
        logits.stride(0),
        output_counts.stride(0),
        vocab_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return logits


apply_penalties = dispatcher(triton=apply_penalties_triton, reference=apply_penalties_ref)
