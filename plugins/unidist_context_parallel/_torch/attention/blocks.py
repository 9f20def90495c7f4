"""Attention of this rank's queries to blocks of keys and values, one after the other, with a running log-sum-exp.

Dao et al. 2022 (https://arxiv.org/abs/2205.14135), section 3.1, with a rank's keys as a block, as in Ring Attention
(Liu et al. 2023, https://arxiv.org/abs/2310.01889).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from unidist_context_parallel._torch.attention import kernel
from unidist_context_parallel._torch.attention.kernel import Score
from unidist_context_parallel.layout.blocks import BlockPart, causal_parts

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AttentionJob:
    """The computation of one attention.

    Args:
        scale: of products of queries and keys.
        causal: a query sees keys up to its own position.
        positions: of this rank's queries.
        groups: queries' heads for each head of keys and values.
        dropout: probability with which weights are left out.
        seed: of those numbers; differs between ranks.
        learns_mask: the mask needs a gradient, for which blocks are computed undivided.
    """

    scale: float
    causal: bool
    positions: Indices
    groups: int = 1
    dropout: float = 0.0
    seed: int = 0
    learns_mask: bool = False


class Forward:
    """The running output.

    Args:
        job: see there.
        q: this rank's queries, `(batch, heads, queries, width)`.
        width: of values.
        mask: None, or `(.., queries, all keys)`, broadcast.
    """

    def __init__(self, job: AttentionJob, q: torch.Tensor, width: int, mask: torch.Tensor | None) -> None:
        self._job, self._q, self._mask, self._width = job, q, mask, width
        self._dtype = kernel.accumulation_dtype(q.dtype)
        self._sums: tuple[torch.Tensor, torch.Tensor] | None = None
        self.rests: list[tuple[Any, ...]] = []

    def add(self, k: torch.Tensor, v: torch.Tensor, positions: Indices, number: int) -> None:
        """Attend to a block of keys and values, `(batch, heads of keys, keys, width)`, at these positions."""
        k, v = _repeated(k, self._job.groups), _repeated(v, self._job.groups)
        for part, score in scores_of(self._job, self._mask, positions, number):
            output, lse, rest = kernel.forward(
                self._q[:, :, part.rows], k[:, :, part.columns], v[:, :, part.columns], score
            )
            self.rests.append(rest)
            if self._sums is None and output.shape[2] == self._q.shape[2]:
                self._sums = output.to(self._dtype), lse.to(self._dtype)
                continue
            if self._sums is None:
                self._sums = self._nothing()
            total, total_lse = self._sums
            self._merge(total[:, :, part.rows], total_lse[:, :, part.rows], output, lse)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, in the type of the queries, and its log-sum-exp."""
        output, lse = self._nothing() if self._sums is None else self._sums
        return output.to(self._q.dtype), lse

    def _nothing(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of queries that see no key."""
        batch, heads, rows = self._q.shape[:3]
        # In memory as (batch, queries, heads, width), as the kernel has it: what follows transposes it back.
        output = self._q.new_zeros((batch, rows, heads, self._width), dtype=self._dtype).transpose(1, 2)
        return output, self._q.new_full((batch, heads, rows), -torch.inf, dtype=self._dtype)

    @staticmethod
    def _merge(output: torch.Tensor, lse: torch.Tensor, new: torch.Tensor, new_lse: torch.Tensor) -> None:
        new_lse = new_lse.to(lse.dtype)
        total = torch.logaddexp(lse, new_lse)
        base = torch.where(total == -torch.inf, 0.0, total)
        output.mul_(torch.exp(lse - base)[..., None])
        output.addcmul_(new.to(output.dtype), torch.exp(new_lse - base)[..., None])
        lse.copy_(total)


class Backward:
    """The gradients of blocks.

    Args:
        job: see there.
        gradient: of the output.
        q: queries.
        output: of forward.
        lse: of forward.
        mask: of forward.
        mask_gradient: where the mask's gradient is added, or None.
        rests: of forward.
    """

    def __init__(
        self,
        job: AttentionJob,
        gradient: torch.Tensor,
        q: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None,
        mask_gradient: torch.Tensor | None,
        rests: list[tuple[Any, ...]],
    ) -> None:
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        self._job, self._gradient, self._q, self._output, self._lse = job, gradient, q, output, lse
        self._mask, self._mask_gradient = mask, mask_gradient
        self._rests = iter(rests)
        self._of_q: torch.Tensor | None = None

    @property
    def of_q(self) -> torch.Tensor:
        """The gradient of the queries so far."""
        return _added(None, self._q[:, :, :0], slice(0, 0), self._q) if self._of_q is None else self._of_q

    def add(
        self, k: torch.Tensor, v: torch.Tensor, positions: Indices, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of a block of keys and values, and add to `of_q`. Blocks come in the order of forward.

        Usually a block is one part, and the gradients are those that the kernel has allocated, in any strides.
        """
        groups, keys, values = self._job.groups, k, v
        of_k: torch.Tensor | None = None
        of_v: torch.Tensor | None = None
        k, v = _repeated(k, groups), _repeated(v, groups)
        for part, score in scores_of(self._job, self._mask, positions, number, self._mask_gradient):
            rows, columns = part.rows, part.columns
            found = kernel.backward(
                self._gradient[:, :, rows], self._q[:, :, rows], k[:, :, columns], v[:, :, columns],
                self._output[:, :, rows], self._lse[:, :, rows].contiguous(), score, next(self._rests),
            )  # fmt: skip
            self._of_q = _added(self._of_q, found[0], rows, self._q)
            of_k = _added(of_k, _summed(found[1], groups), columns, keys)
            of_v = _added(of_v, _summed(found[2], groups), columns, values)
        if of_k is None or of_v is None:
            empty = slice(0, 0)
            return _added(None, keys[:, :, :0], empty, keys), _added(None, values[:, :, :0], empty, values)
        return of_k, of_v


def scores_of(
    job: AttentionJob,
    mask: torch.Tensor | None,
    positions: Indices,
    number: int,
    mask_gradient: torch.Tensor | None = None,
) -> Iterator[tuple[BlockPart, Score]]:
    """Yield the parts of a block that are to be computed; the same in forward and in backward."""
    rows = len(job.positions)
    if not rows or not len(positions):
        return
    parts = (
        causal_parts(job.positions, positions)
        if job.causal
        else [BlockPart(slice(0, rows), slice(0, len(positions)), "full")]
    )
    for index, part in enumerate(parts):
        seed = (job.seed + 0x9E3779B97F4A7C15 * (1 + 64 * number + index)) % 2**63
        score = Score(job.scale, causal=part.kind == "causal", dropout=job.dropout, seed=seed)
        if part.kind == "mixed":
            queries, keys = job.positions[part.rows], positions[part.columns]
            seen = torch.from_numpy(keys[None, :] <= queries[:, None])
            yield part, replace(score, mask=seen)
        elif mask is None:
            yield part, score
        else:
            yield from _masked(job, mask, positions, part, score, mask_gradient)


def _masked(
    job: AttentionJob,
    mask: torch.Tensor,
    positions: Indices,
    part: BlockPart,
    score: Score,
    mask_gradient: torch.Tensor | None,
) -> Iterator[tuple[BlockPart, Score]]:
    if job.learns_mask:
        at = torch.from_numpy(positions).to(mask.device)
        rows = _columns(mask, at)
        gradient = torch.zeros_like(rows) if mask_gradient is not None else None
        yield part, replace(score, mask=rows, mask_gradient=gradient)
        if mask_gradient is None or gradient is None:
            return
        if mask.shape[-1] == 1:
            mask_gradient.add_(gradient)
        else:
            mask_gradient.index_add_(-1, at, gradient)
        return
    runs = np.flatnonzero(np.diff(positions) != 1) + 1
    bounds = [0, *runs.tolist(), len(positions)]
    halves = [0, part.rows.stop // 2, part.rows.stop] if part.rows.stop > 1 else [0, part.rows.stop]
    if len(bounds) > 5:
        bounds, halves = [0, len(positions)], [0, part.rows.stop]
    # A part that no query sees is left out, and one that all see needs no mask: half of a causal one. The rows of a
    # zig-zag division are two runs of the same length.
    for top, bottom in itertools.pairwise(halves):
        for left, right in itertools.pairwise(bounds):
            at = torch.from_numpy(positions[left:right]).to(mask.device)
            block = _columns(mask, at)
            block = block[..., top:bottom, :] if block.shape[-2] > 1 else block
            unseen = ~block if block.dtype == torch.bool else block == -torch.inf
            if bool(unseen.all()):
                continue
            plain = not bool(unseen.any()) if block.dtype == torch.bool else not bool(block.any())
            found = BlockPart(slice(top, bottom), slice(left, right), "full")
            seed = (score.seed + 8 * top + left) % 2**63
            yield found, replace(score, mask=None if plain else block, seed=seed)


def _columns(mask: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return mask if mask.shape[-1] == 1 else mask.index_select(-1, at)


def _added(total: torch.Tensor | None, part: torch.Tensor, at: slice, like: torch.Tensor) -> torch.Tensor:
    """Return a sum with a part added to these rows, in the type in which parts are added up; None is zeros like these.

    A first part that has all rows is taken as it is, without memory for zeros.
    """
    dtype = kernel.accumulation_dtype(like.dtype)
    if total is None and at == slice(0, like.shape[2]) and len(part):
        return part.to(dtype)
    total = torch.zeros_like(like, dtype=dtype) if total is None else total
    total[:, :, at].add_(part)
    return total


def _repeated(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _summed(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x if groups == 1 else x.view(x.shape[0], -1, groups, *x.shape[2:]).sum(2)
