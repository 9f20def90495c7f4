"""Keys and values go around the ranks, and each rank attends to those that it has: see `blocks`.

Liu et al. 2023 (https://arxiv.org/abs/2310.01889). The next block may arrive while the present one is used. Backward,
the gradients of a block go around with it, until they are back at its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from unidist_context_parallel.attention.arrays import Array
from unidist_context_parallel.attention.blocks import BlockAttention
from unidist_context_parallel.layout.sequence import ring_owners


class Shift(Protocol):
    """`shift(arrays, rows, after)` sends arrays to the next rank, and returns those of the rank before. Collective."""

    def __call__(self, arrays: Sequence[Array], rows: int, after: Sequence[Array]) -> list[Array]:
        """See the class.

        Args:
            arrays: `(B, K, 1, T, W)`; with equal shapes on all ranks but for T.
            rows: T of those that arrive.
            after: what is to be there before they are sent, see `ArrayFunctions.after`.
        """


def attend(attention: BlockAttention, shift: Shift, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Return the output of this rank's queries, and its log-sum-exp, which `gradients` needs; see `blocks` for shapes.

    Collective: every rank calls it with the same arguments but for the values of arrays.

    Args:
        attention: see there.
        shift: see there.
        q: queries times the scale, in the type that is computed in.
        k: this rank's keys.
        v: this rank's values.
    """
    owners = ring_owners(attention.rank, attention.layout.num_ranks)
    running = attention.start()
    for step, owner in enumerate(owners):
        following: list[Array] = []
        if step + 1 < len(owners):
            following = shift([k, v], attention.layout.counts[owners[step + 1]], running.latest)
        running = attention.add(running, q, k, v, owner)
        if following:
            k, v = following
    return attention.finish(running)


def gradients(
    attention: BlockAttention, shift: Shift, gradient: Array, q: Array, k: Array, v: Array, output: Array, sums: Array
) -> tuple[Array, Array, Array]:
    """Return the gradients of q, k and v, in the type of q. Collective.

    Args:
        attention: as in `attend`.
        shift: the same.
        gradient: of the output.
        q: as in `attend`.
        k: this rank's keys.
        v: this rank's values.
        output: what `attend` returned.
        sums: the same.
    """
    f, layout = attention.functions, attention.layout
    owners = ring_owners(attention.rank, layout.num_ranks)
    gradient = f.cast(gradient, q)
    inner = f.sum(gradient * output, -1)
    of_q, arriving = f.zeros_like(q), list[Array]()
    for step, owner in enumerate(owners):
        following: list[Array] = []
        if step + 1 < len(owners):
            following = shift([k, v], layout.counts[owners[step + 1]], [of_q])
        own_q, of_k, of_v = attention.backward(gradient, inner, q, k, v, sums, owner, of_q)
        of_q = of_q + own_q
        if arriving:
            of_k, of_v = of_k + arriving[0], of_v + arriving[1]
        arriving = shift([of_k, of_v], layout.counts[owners[(step + 1) % len(owners)]], [])
        if following:
            k, v = following
    return of_q, arriving[0], arriving[1]
