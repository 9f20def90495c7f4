"""The number of tokens that an expert accepts. Pure arithmetic."""

from __future__ import annotations

import math


def capacity(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Return how many tokens of a batch each expert takes (Fedus et al. 2021, https://arxiv.org/abs/2101.03961).

    Args:
        num_tokens: of the batch, on all ranks together.
        num_experts: of the layer.
        top_k: experts that a token goes to.
        factor: 1 for as many as there are if all experts get equally many.
    """
    return max(1, math.ceil(factor * num_tokens * top_k / num_experts))
