"""The mean of a number over the ranks that see different data, or over their samples: the loss of `TrainStep`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp
from unidist.mesh import REPLICA_AXES
from unidist.negotiation import OperationKind, Request

if TYPE_CHECKING:
    from unidist.runtime.context import Context

_LOSS, _SAMPLES = "loss of a training step", "samples of a training step"


class MeanLoss:
    """Averages over the ranks that see different data. Collective, when it is made and whenever it is called.

    A runtime has one, see `owned`. Where these are all ranks, it is a named operation: a rank that has joined takes
    part in it with nothing.

    Args:
        context: the runtime.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._size = context.axis_size(REPLICA_AXES)
        spans_world = self._size == context.topology.world_size
        self._axis = None if spans_world else context.new_communicator(REPLICA_AXES)

    def over_samples(self, value: float, samples: float) -> tuple[float, float]:
        """Return the mean over the samples of all ranks, and the factor with which a mean over the ranks is that.

        Ranks that have joined have no samples; a mean over the ranks counts them, as averages of gradients do.

        Args:
            value: the mean over this rank's samples.
            samples: see `weight_of`.
        """
        if self._size == 1:
            return value, 1.0
        weighted, total, plain, count = self._sums(value * samples, float(samples), value, 1.0)
        if not total:
            return plain / count, 1.0
        return weighted / total, samples * self._size / total

    def weight_of(self, samples: float) -> float:
        """Return the factor of this rank's loss that makes a mean over the ranks one over the samples of all ranks.

        A mean over the ranks counts also those that have joined, as averages of gradients do.

        Args:
            samples: of this rank, or what else its mean was divided by. If no rank has any, the ranks count equally.
        """
        if self._size == 1:
            return 1.0
        total = self._sums(float(samples), name=_SAMPLES)[0]
        return samples * self._size / total if total else 1.0

    def average(self, values: Any, name: str) -> None:
        """Replace a vector by the mean of those of the ranks that have not joined.

        Args:
            values: an array of floating point whose last element is 1; equally long on all ranks.
            name: of the operation.
        """
        if self._size > 1:
            buffer = Buffer.of(values)
            self._add_up(buffer, len(values), name)
            values /= values[-1]

    def close(self) -> None:
        """See `unidist.runtime_api.Owned`: the runtime closes the communicator."""

    def of_all(self, value: float) -> float:
        """Return the sum of the values divided by the number of all ranks, also of those that have joined."""
        return self._sums(value)[0] / self._size if self._size > 1 else value

    def _sums(self, *values: float, name: str = _LOSS) -> Sequence[float]:
        buffer = Buffer.allocate(len(values), DType.FLOAT64)
        numbers = buffer.bytes().cast("d")
        for place, value in enumerate(values):
            numbers[place] = value
        self._add_up(buffer, len(values), name)
        return list(numbers)

    def _add_up(self, buffer: Buffer, length: int, name: str) -> None:
        if self._axis is not None:
            self._axis.allreduce(buffer, buffer).wait()
        else:
            request = Request(name, OperationKind.ALLREDUCE, buffer, buffer, (length,), ReduceOp.SUM)
            self._context.operations().submit(request).wait()


class SampleWeight:
    """The weight of this rank's loss in a step, by which a mean over the ranks is one over the samples of all ranks.

    One exchange tells the weight before the passes, and another one the mean. Where the whole loss is known before its
    weight is needed, one exchange tells both.

    Args:
        means: over the ranks.
        samples: of this rank, or what else its mean was divided by.
        factor: if it is known.
    """

    def __init__(self, means: MeanLoss, samples: float, *, factor: float | None = None) -> None:
        self._means, self._samples, self._factor = means, samples, factor
        self._mean: float | None = None

    def factor(self, loss: Callable[[], float] | None = None) -> float:
        """Return the factor of the loss. Collective at the first call.

        Args:
            loss: returns the whole loss, without the factor; None: it is not known yet.
        """
        if self._factor is None and loss is None:
            self._factor = self._means.weight_of(self._samples)
        elif self._factor is None and loss is not None:
            self._mean, self._factor = self._means.over_samples(loss(), self._samples)
        assert self._factor is not None
        return self._factor

    def take(self, factor: float) -> None:
        """Let this be the factor: a compiled program has found it while it computed the loss."""
        self._factor = factor

    def mean(self, loss: Callable[[], float]) -> float:
        """Return the mean over the samples of all ranks. Collective.

        Args:
            loss: returns this rank's loss times the factor; not called where the mean is known.
        """
        return self._means.of_all(loss()) if self._mean is None else self._mean
