"""Adasum: a sum that lessens what the ranks' vectors have in common, so that it need not be scaled by their number.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021. Two vectors a and b become
(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum where they are orthogonal, their mean where they are equal.
More are combined in pairs, then pairs of pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unidist.algorithms._messages import exchange, speaking_for
from unidist.buffer import Buffer
from unidist.communicator import Communicator
from unidist.errors import UsageError

if TYPE_CHECKING:
    import numpy.typing as npt


def adasum_allreduce(communicator: Communicator, source: Buffer, target: Buffer, *, scale: float = 1.0) -> None:
    """Write the Adasum of all ranks' vectors, times `scale`, to `target`. Collective; blocks until it is done.

    Recursive doubling: each of log2(size) steps exchanges the whole vector with a partner. Products are added up in
    float64, and both partners compute the same bits.

    Args:
        communicator: of a number of ranks that is a power of two.
        source: this rank's vector, of a floating-point type.
        target: as long; may be `source`.
        scale: factor for the result.

    Raises:
        UsageError: the number of ranks is not a power of two, or the type is not of floating point.
        PeerLostError: a peer died or did not come.
    """
    from unidist.algorithms._reduce_numpy import from_wide, to_wide

    rank, size = communicator.rank, communicator.size
    if size & (size - 1):
        raise UsageError(f"Adasum combines ranks in pairs: {size} ranks are not a power of 2")
    if not source.dtype.is_floating:
        raise UsageError(f"Adasum needs floating-point numbers, not {source.dtype}")
    if target.address != source.address:
        target.bytes()[:] = source.bytes()
    incoming = communicator.allocate(target.nbytes).cast(target.dtype)
    with speaking_for(communicator, "adasum"):
        distance = 1
        while distance < size:
            partner = rank ^ distance
            exchange(communicator, target, to=partner, incoming=incoming, source=partner)
            own, other = to_wide(target), to_wide(incoming)
            lower, upper = (own, other) if rank < partner else (other, own)
            from_wide(_combine(lower, upper), target)
            distance *= 2
    if scale != 1.0:
        from_wide(to_wide(target) * scale, target)


def _combine(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    import numpy as np

    wide_a, wide_b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
    product, norm_a, norm_b = float(wide_a @ wide_b), float(wide_a @ wide_a), float(wide_b @ wide_b)
    factor_a = 1.0 - product / (2 * norm_a) if norm_a > 0 else 1.0
    factor_b = 1.0 - product / (2 * norm_b) if norm_b > 0 else 1.0
    result: npt.NDArray[Any] = factor_a * wide_a + factor_b * wide_b
    return result
