"""The mean of a number over the ranks that see different data: what `TrainStep` returns as the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp
from unidist.mesh import REPLICA_AXES
from unidist.negotiation import OperationKind, Request

if TYPE_CHECKING:
    from unidist.runtime.context import Context

_NAME = "loss of a training step"


class MeanLoss:
    """Averages over the ranks that see different data. Collective, when it is made and whenever it is called.

    Where these are all ranks, it is a named operation: a rank that has joined takes part in it with nothing.

    Args:
        context: the runtime.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._size = context.axis_size(REPLICA_AXES)
        spans_world = self._size == context.topology.world_size
        self._axis = None if spans_world else context.new_communicator(REPLICA_AXES)

    def __call__(self, value: float) -> float:
        """Return the mean of the values of all ranks that have not joined, equal on every rank of the axis."""
        if self._size == 1:
            return value
        buffer = Buffer.allocate(2, DType.FLOAT64)
        numbers = buffer.bytes().cast("d")
        numbers[0], numbers[1] = value, 1.0
        if self._axis is not None:
            self._axis.allreduce(buffer, buffer).wait()
        else:
            request = Request(_NAME, OperationKind.ALLREDUCE, buffer, buffer, (2,), ReduceOp.SUM)
            self._context.operations().submit(request).wait()
        return numbers[0] / numbers[1]
