"""Gets the keys and values of other ranks for attention: around a ring, all at once, or not at all if local.

The ring needs memory for two blocks, and the next one arrives while the present one is used; its backward pass sends
the gradients of a block along with it until they are home. Gathering needs memory for all keys and values of one layer.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from unidist_context_parallel._torch.attention.blocks import AttentionJob, Backward, Forward
from unidist_context_parallel._torch.divided.axis import ContextAxis
from unidist_context_parallel.layout.sequence import SequenceLayout, ring_owners
from unidist_torch.memory import refuse_transformed
from unidist_torch.operations.differentiable import check_once

Way = Literal["ring", "gather", "here"]


def attend(
    job: AttentionJob,
    way: Way,
    axis: ContextAxis,
    layout: SequenceLayout | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return the output of this rank's queries, `(batch, heads, queries, width)`. Differentiable.

    Collective: every rank calls it with the same arguments but for the values of tensors.

    Args:
        job: see there.
        way: "here": k and v are whole on every rank.
        axis: the ranks.
        layout: of keys and values; None if they are whole.
        q: `(batch, heads, queries, width)`.
        k: `(batch, heads of keys, keys of this rank, width)`.
        v: likewise.
        mask: None, or `(.., queries, all keys)`, broadcast.
    """
    refuse_transformed()
    output: torch.Tensor = _Attention.apply(job, way, axis, layout, q, k, v, mask)  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        job: AttentionJob,
        way: Way,
        axis: ContextAxis,
        layout: SequenceLayout | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        given = mask.detach() if mask is not None else None
        forward = Forward(job, q, v.shape[-1], given)
        if way == "ring":
            assert layout is not None
            for step, (keys, values, rank) in enumerate(_around(axis, layout, k, v)):
                forward.add(keys, values, layout.positions(rank), step)
        else:
            keys, values = k, v
            if way == "gather":
                assert layout is not None
                keys, values = axis.gather(k, layout, 2), axis.gather(v, layout, 2)
            forward.add(keys, values, np.arange(keys.shape[2]), 0)
        output, lse = forward.result()
        ctx.job, ctx.way, ctx.axis, ctx.layout = job, way, axis, layout
        ctx.rests = forward.rests
        return _kept(ctx, output, lse, q, k, v, mask)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        check_once("attention over divided tokens")
        q, k, v, output, lse, mask = ctx.saved_tensors
        axis, layout = ctx.axis, ctx.layout
        of_mask = torch.zeros_like(mask) if ctx.needs_input_grad[7] else None
        given = None if mask is None else mask.detach()
        backward = Backward(ctx.job, gradients[0], q, output, lse, given, of_mask, ctx.rests)
        if ctx.way == "ring":
            of_k, of_v = _ring_backward(backward, axis, layout, k, v)
        else:
            if ctx.way == "gather":
                k, v = axis.gather(k, layout, 2), axis.gather(v, layout, 2)
            of_k, of_v = backward.add(k, v, np.arange(k.shape[2]), 0)
            if ctx.way == "gather":
                of_k, of_v = axis.scatter_sum(of_k, layout, 2), axis.scatter_sum(of_v, layout, 2)
        return (None, None, None, None, backward.of_q.to(q.dtype), of_k.to(q.dtype), of_v.to(q.dtype), of_mask)


def _kept(ctx: Any, output: torch.Tensor, lse: torch.Tensor, *inputs: torch.Tensor | None) -> torch.Tensor:
    q, k, v, mask = inputs
    ctx.save_for_backward(q, k, v, output, lse, mask)
    return output


def _packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return keys and values as one message."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(message: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values in a message of so many rows, with the other sizes of these."""
    shapes = [torch.Size((*each.shape[:2], rows, each.shape[3])) for each in (k, v)]
    sizes = [shape.numel() for shape in shapes]
    parts = torch.split(message, sizes)
    return parts[0].view(shapes[0]), parts[1].view(shapes[1])


def _size(k: torch.Tensor, v: torch.Tensor, rows: int) -> int:
    return int(k.shape[0] * rows * (k.shape[1] * k.shape[3] + v.shape[1] * v.shape[3]))


def _around(axis: ContextAxis, layout: SequenceLayout, k: torch.Tensor, v: torch.Tensor) -> Any:
    """Yield the keys and values of each rank, this one's first, and its number."""
    present = _packed(k, v)
    owners = ring_owners(axis.rank, axis.size)
    for step, rank in enumerate(owners):
        works: list[Any] = []
        if step < axis.size - 1:
            following = present.new_empty(_size(k, v, layout.counts[owners[step + 1]]))
            works = axis.start_shift(present, following)
        yield (*_unpacked(present, k, v, layout.counts[rank]), rank)
        for work in works:
            work.wait()
        if works or step < axis.size - 1:
            present = following


def _ring_backward(
    backward: Backward, axis: ContextAxis, layout: SequenceLayout, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of this rank's keys and values, which every rank adds to while they go around."""
    arriving: torch.Tensor | None = None
    sent: torch.Tensor | None = None  # stays until it has been sent
    works: list[Any] = []
    for step, (keys, values, rank) in enumerate(_around(axis, layout, k, v)):
        parts = backward.add(keys, values, layout.positions(rank), step)
        for work in works:
            work.wait()
        del sent  # before memory for the next message is taken
        own = _packed(*parts)
        del parts
        if arriving is not None:
            own.add_(arriving)
        del arriving
        arriving = own.new_empty(_size(k, v, layout.counts[(rank - 1) % axis.size]))
        works = axis.start_shift(own, arriving)
        sent = own
        del own
    for work in works:
        work.wait()
    del sent
    assert arriving is not None
    return _unpacked(arriving, k, v, layout.counts[axis.rank])
