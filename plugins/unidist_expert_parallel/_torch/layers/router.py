"""The choice of experts: scores, the top k, and which assignments exceed the capacity."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

Softmax = Literal["before", "after"]


class Router(nn.Module):
    """Scores of the experts for each token, by one matrix.

    Args:
        width: of tokens.
        num_experts: of the layer.
        device: of the matrix.
        dtype: of the matrix. Scores have at least 32 bits.

    Attributes:
        weight: `(num_experts, width)`.
    """

    def __init__(
        self,
        width: int,
        num_experts: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, width, device=device, dtype=dtype))
        nn.init.uniform_(self.weight, -1.0 / math.sqrt(width), 1.0 / math.sqrt(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take `(tokens, width)`, return scores `(tokens, num_experts)`."""
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        return F.linear(tokens.to(dtype), self.weight.to(dtype))


def choose(
    scores: torch.Tensor, top_k: int, *, softmax: Softmax, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the probabilities of all experts, and weights and numbers of the chosen ones.

    Args:
        scores: `(tokens, experts)`.
        top_k: number of experts to choose.
        softmax: "before" takes the probabilities of all experts, "after" the softmax of the chosen scores.
        normalize: with "before", divide the weights by their sum.

    Returns:
        `(tokens, experts)`, `(tokens, k)` and `(tokens, k)`, int64.
    """
    probabilities = scores.softmax(-1)
    if softmax == "after":
        chosen, index = scores.topk(top_k, -1)
        return probabilities, chosen.softmax(-1), index
    weights, index = probabilities.topk(top_k, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return probabilities, weights, index


def counts_of(index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the number of tokens for each choice and expert, `(k, num_experts)`, int64, in host memory."""
    top_k = index.shape[1]
    choices = torch.arange(top_k, device=index.device) * num_experts
    flat = (index + choices).reshape(-1)
    counts = torch.zeros(top_k * num_experts, dtype=torch.int64, device=index.device)
    counts.index_add_(0, flat, torch.ones_like(flat))  # bincount would have the host wait for its size
    return counts.view(top_k, num_experts).cpu()


def within_capacity(index: torch.Tensor, everyone: torch.Tensor, replica: int, limit: int) -> torch.Tensor:
    """Return which assignments are within the capacity of their expert, `(tokens, k)`, bool.

    First choices of all tokens come before second ones (Lepikhin et al. 2020, section 2.2), and among those the tokens
    of earlier ranks before those of later ones: as in one process that has the tokens of all ranks, in their order.

    Args:
        index: `(tokens, k)`, the experts.
        everyone: `(replicas, k, experts)`, `counts_of` of all ranks; in host memory.
        replica: this rank's place among them.
        limit: tokens for each expert.
    """
    totals = everyone.sum(0)
    before = totals.cumsum(0) - totals + everyone[:replica].sum(0)  # (k, experts)
    top_k, num_experts = totals.shape
    hot = F.one_hot(index, num_experts)  # (tokens, k, experts)
    places = (hot.cumsum(0) - 1).gather(2, index.unsqueeze(-1)).squeeze(-1)
    choices = torch.arange(top_k, device=index.device).expand_as(index)
    return places + before.to(index.device)[choices, index] < limit
