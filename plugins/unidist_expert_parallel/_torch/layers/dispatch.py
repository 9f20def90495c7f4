"""Tokens to their experts, on whatever rank these are, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unidist_expert_parallel._torch.layers.axis import ExpertAxis
from unidist_torch.host_copies import pins
from unidist_torch.models import plain_use

Compute = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""Computes this rank's experts: from their rows, `(rows, width)`, ordered by expert, and the number of rows of each.

Returns as many rows. Called on every rank, also without rows; must then give every parameter a gradient, too.
"""


def own_tokens(tensor: Any) -> torch.Tensor | None:
    """Return what this rank has of a tensor that is divided along the sequence; None: it is an ordinary one.

    Such a tensor (of the strategy context) has `local`, and `like(local)` makes another one. As each token is computed
    by itself, the layer works on those of the rank.
    """
    found: torch.Tensor | None = getattr(tensor, "local", None)
    return found


def dispatch(
    tokens: torch.Tensor,
    index: torch.Tensor,
    num_experts: int,
    compute: Compute,
    axis: ExpertAxis | None,
    counts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return what the chosen experts make of each token. Collective over the axis, forward and backward.

    Args:
        tokens: `(tokens, width)`; ranks may have different numbers, also none.
        index: `(tokens, k)`, int64: the experts that a token goes to; `num_experts` for none.
        num_experts: of the layer, on all ranks.
        compute: of the experts that this rank has.
        axis: whose ranks have the experts; None: this process has all.
        counts: number of tokens for each expert, if known already.

    Returns:
        `(tokens, k, width)`: the outputs of a token's experts; zeros for no expert.
    """
    flat = index.reshape(-1)
    if counts is None:
        counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts].tolist()
    order = torch.argsort(flat, stable=True)[: sum(counts)]  # those without an expert come last
    rows = tokens.index_select(0, order // index.shape[1])
    results = compute(rows, counts) if axis is None else _elsewhere(rows, counts, compute, axis)
    whole = results.new_zeros((flat.shape[0], results.shape[1])).index_copy(0, order, results)
    return whole.view(*index.shape, results.shape[1])


def _elsewhere(rows: torch.Tensor, counts: Sequence[int], compute: Compute, axis: ExpertAxis) -> torch.Tensor:
    """Return the results of rows that are ordered by their experts, which the ranks of the axis hold."""
    each = len(counts) // axis.size
    arriving = axis.exchange_counts(counts)  # by rank, then by this rank's experts
    sent = [sum(counts[rank * each : (rank + 1) * each]) for rank in range(axis.size)]
    received = [sum(arriving[rank * each : (rank + 1) * each]) for rank in range(axis.size)]
    here = axis.exchange(rows, sent, received)
    experts = torch.arange(each).repeat(axis.size)
    by_expert = torch.argsort(experts.repeat_interleave(torch.tensor(arriving)), stable=True)
    if not rows.is_cpu:  # the host need not wait for copies from pinned memory
        by_expert = (by_expert.pin_memory() if pins() else by_expert).to(rows.device, non_blocking=True)
    with plain_use():  # the experts know that they are this rank's
        results = compute(here.index_select(0, by_expert), [sum(arriving[number::each]) for number in range(each)])
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(len(by_expert), device=rows.device)
    return axis.exchange(results.index_select(0, back), received, sent)
