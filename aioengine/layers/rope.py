"""Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) with the scalings of long-context models.

Convention of transformers: dimension i turns with dimension i + head_dim/2 ("rotate half"). Frequencies and angles are
computed in float32 in the same order of operations as transformers, so that logits agree to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """theta: base of the wavelengths. kind: "default", "linear", "llama3", "yarn" or "dynamic"; parameters: what the kind needs,
    under the names of transformers' `rope_parameters`."""

    theta: float
    kind: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rotation:
    """One step's cosines and sines, gathered once and shared by all layers."""

    cos: torch.Tensor  # [n, 1, head_dim]
    sin: torch.Tensor  # [n, 1, head_dim], the first half negated

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, heads, head_dim] -> the same, turned to its positions."""
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        # Not addcmul: it may fuse the rounding in vector lanes but not in the tail, and then a row's bits would depend
        # on its batch mates.
        return swapped.mul_(self.sin).add_(x * self.cos)


@dataclass(frozen=True, slots=True)
class PositionsInTable:
    """One step's angles as places in the table, for backends that rotate by themselves (`AttentionBackend.fuses_rope`)."""

    positions: torch.Tensor  # [n] int64
    table: torch.Tensor  # [max_positions, head_dim] float32: cosines in the first half, sines in the second


class RotaryEmbedding:
    """The table of all positions: [max_positions, head_dim], cosines in the first half, sines in the second."""

    def __init__(self, config: RopeConfig, *, head_dim: int, max_positions: int, device: torch.device) -> None:
        inverse, scale = inverse_frequencies(config, head_dim=head_dim, max_positions=max_positions)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse  # [max_positions, head_dim / 2]
        self.table = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).to(device)

    def gather(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """positions [n] int64, each below max_positions."""
        cos, sin = self.table[positions].to(dtype).unsqueeze(1).chunk(2, dim=-1)
        return Rotation(cos=torch.cat((cos, cos), dim=-1), sin=torch.cat((-sin, sin), dim=-1))

    def places(self, positions: torch.Tensor, dtype: torch.dtype) -> PositionsInTable:
        """positions [n] int64, each below max_positions. The table is read in float32, whatever the dtype."""
        return PositionsInTable(positions, self.table)


def inverse_frequencies(config: RopeConfig, *, head_dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    """The angle a position, [head_dim / 2] float32, and the factor on cosines and sines.

    Two parameters that only GGUF files have go with every kind: `frequency_factors`, one divisor for each frequency, and `magnitude`,
    a factor on cosines and sines.

    Raises ValueError for a kind not known here and KeyError for a missing parameter.
    """
    inverse, scale = _scaled_frequencies(config, head_dim=head_dim, max_positions=max_positions)
    factors = config.parameters.get("frequency_factors")
    if factors is not None:
        inverse = inverse / torch.tensor(factors, dtype=torch.float32)
    return inverse, scale * config.parameters.get("magnitude", 1.0)


def _scaled_frequencies(config: RopeConfig, *, head_dim: int, max_positions: int) -> tuple[torch.Tensor, float]:
    powers = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    inverse = 1.0 / powers
    parameters = config.parameters
    if config.kind == "default":
        return inverse, 1.0
    if config.kind == "linear":
        return inverse / parameters["factor"], 1.0
    if config.kind == "llama3":
        return _llama3(inverse, parameters), 1.0
    if config.kind == "yarn":
        return _yarn(powers, config.theta, head_dim, max_positions, parameters)
    if config.kind == "dynamic":
        # Up to the trained length, which is also this engine's limit, dynamic scaling changes nothing.
        return inverse, 1.0
    raise ValueError(f"unknown rope type {config.kind!r}; known: default, linear, llama3, yarn, dynamic")


def _llama3(inverse: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    trained = parameters["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > trained / low, inverse / factor, inverse)
    smooth = (trained / wavelength - low) / (high - low)
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def _yarn(
    powers: torch.Tensor, theta: float, head_dim: int, max_positions: int, parameters: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023, https://arxiv.org/abs/2309.00071)."""
    trained = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or max_positions / trained

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        weight, weight_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention_factor = mscale(weight) / mscale(weight_all) if weight and weight_all else mscale(1.0)

    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times over the trained length."""
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    interpolate = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    keep = 1 - interpolate
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep, float(attention_factor)
