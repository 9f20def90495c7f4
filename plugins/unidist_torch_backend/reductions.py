"""torch.distributed's reductions in terms of unidist's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from unidist.communicator import ReduceOp
from unidist.errors import UsageError

_PLAIN: dict[Any, ReduceOp] = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
}
_BITWISE: dict[Any, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
_BOOLEAN: dict[Any, ReduceOp] = {dist.ReduceOp.BAND: ReduceOp.MIN, dist.ReduceOp.BOR: ReduceOp.MAX}


@dataclass(frozen=True)
class GroupReduction:
    """A reduction: its operation and its factors.

    Args:
        op: the communicator's operation.
        scale: factor of the result.
        factor: factor of this rank's values before the reduction, if any (PREMUL_SUM).
        bitwise: reduces two tensors, where the communicator cannot: values are gathered then.
    """

    op: ReduceOp = ReduceOp.SUM
    scale: float = 1.0
    factor: Any = None
    bitwise: Callable[..., torch.Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        """The communicator carries it out alone."""
        return self.factor is None and self.bitwise is None


_SUM = GroupReduction()


def reduction(asked: Any, dtype: torch.dtype, size: int, what: str) -> GroupReduction:
    """Return how to carry out a `torch.distributed.ReduceOp` over `size` ranks.

    AVG of integers is truncated toward zero. On bool, SUM is "or" and PRODUCT is "and".

    Raises:
        UsageError: there is no such reduction of this dtype.
    """
    kind = getattr(asked, "op", asked)
    if kind == dist.ReduceOp.SUM:
        return _SUM
    if kind == dist.ReduceOp.AVG:
        if dtype is torch.bool:
            raise UsageError(f"{what} by backend unidist: there is no mean of torch.bool")
        return GroupReduction(scale=1.0 / size)
    if kind in _PLAIN:
        return GroupReduction(_PLAIN[kind])
    if kind in _BITWISE:
        if dtype.is_floating_point or dtype.is_complex:
            raise UsageError(f"{what} by backend unidist: {kind.name} is for integers and bool, not {dtype}")
        if dtype is torch.bool and kind in _BOOLEAN:
            return GroupReduction(_BOOLEAN[kind])
        return GroupReduction(bitwise=_BITWISE[kind])
    factor = asked.__getstate__()[1] if kind == dist.ReduceOp.PREMUL_SUM else None
    if factor is None:
        raise UsageError(f"{what} by backend unidist: it has no reduction {kind}")
    if not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"{what} by backend unidist: PREMUL_SUM is for floating-point numbers, not {dtype}")
    return GroupReduction(factor=factor)
