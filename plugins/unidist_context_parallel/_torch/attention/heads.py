"""Attention by exchanging tokens for heads: each rank computes some of the heads for all tokens.

Jacobs et al. 2023 (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509), section 3.
"""

from __future__ import annotations

import torch

from unidist.errors import ConfigurationError
from unidist_context_parallel._torch.divided.axis import ContextAxis, apply_once
from unidist_context_parallel.layout.sequence import SequenceLayout


def check_heads(heads: int, axis: ContextAxis) -> None:
    """Raise ConfigurationError if the heads do not divide."""
    if heads % axis.size:
        raise ConfigurationError(
            f"context={axis.size}:exchange=ulysses divides the heads of an attention over the ranks, and {heads} heads "
            f"do not divide by {axis.size}. Use exchange=ring or exchange=gather"
        )


def to_heads(rows: torch.Tensor, layout: SequenceLayout, axis: ContextAxis) -> torch.Tensor:
    """Return this rank's heads of all tokens, from all heads of this rank's tokens. Differentiable.

    Args:
        rows: `(batch, heads, tokens of this rank, width)`; the heads divide.
        layout: of the tokens.
        axis: the ranks.
    """
    return apply_once(rows, lambda x: _to_heads(x, layout, axis), lambda gradient: _to_rows(gradient, layout, axis))


def to_rows(heads: torch.Tensor, layout: SequenceLayout, axis: ContextAxis) -> torch.Tensor:
    """Return all heads of this rank's tokens, from this rank's heads of all tokens. Differentiable."""
    return apply_once(heads, lambda x: _to_rows(x, layout, axis), lambda gradient: _to_heads(gradient, layout, axis))


def _to_heads(x: torch.Tensor, layout: SequenceLayout, axis: ContextAxis) -> torch.Tensor:
    batch, heads, rows, width = x.shape
    own = heads // axis.size
    source = x.reshape(batch, axis.size, own, rows, width).movedim(1, 0).contiguous().view(-1)
    unit = batch * own * width
    received = axis.alltoall(source, [rows * unit] * axis.size, [count * unit for count in layout.counts])
    parts = torch.split(received, [count * unit for count in layout.counts])
    joined = torch.cat(
        [part.view(batch, own, count, width) for part, count in zip(parts, layout.counts, strict=True)], 2
    )
    return joined.index_select(2, torch.from_numpy(layout.gathered_order()).to(x.device))


def _to_rows(x: torch.Tensor, layout: SequenceLayout, axis: ContextAxis) -> torch.Tensor:
    batch, own, _, width = x.shape
    unit, rows = batch * own * width, layout.counts[axis.rank]
    parts = [
        x.index_select(2, torch.from_numpy(layout.positions(rank)).to(x.device)).reshape(-1)
        for rank in range(axis.size)
    ]
    received = axis.alltoall(torch.cat(parts), [part.numel() for part in parts], [rows * unit] * axis.size)
    return received.view(axis.size, batch, own, rows, width).movedim(0, 1).reshape(batch, axis.size * own, rows, width)
