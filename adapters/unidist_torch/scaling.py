"""Integers times a factor, as the core's kernels compute them, on any device."""

from __future__ import annotations

import torch


def scaled_integers(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Return integers times `scale`, computed in float64 and truncated toward zero; 1/n divides exactly."""
    if values.dtype is torch.bool:
        return values if scale else torch.zeros_like(values)
    divisor = round(1.0 / scale) if scale else 0
    wide = values.to(torch.float64)
    found = torch.trunc(wide / divisor if divisor and 1.0 / divisor == scale else wide * scale)
    return found.to(values.dtype)
