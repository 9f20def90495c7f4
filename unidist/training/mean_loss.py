"""The mean of a number over the ranks that see different data, or over their samples: the loss of `TrainStep`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp
from unidist.errors import UsageError
from unidist.mesh import REPLICA_AXES
from unidist.negotiation import OperationKind, Request

if TYPE_CHECKING:
    from unidist.optim.update import Update
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

    @property
    def size(self) -> int:
        """The number of ranks; a mean counts also those that have joined, as averages of gradients do."""
        return self._size

    def over_samples(self, value: float, samples: float) -> tuple[float, float]:
        """Return the mean over the samples of all ranks, and their number. If there are none, the ranks count equally.

        Ranks that have joined have no samples.

        Args:
            value: the mean over this rank's samples; does not matter if there are none.
            samples: of this rank, or what else the sum of its losses was divided by.
        """
        if self._size == 1:
            return value, samples
        weighted, total, plain, count = self._sums(value * samples if samples else 0.0, samples, value, 1.0)
        return weighted / total if total else plain / count, total

    def total(self, samples: float) -> float:
        """Return the number of samples of all ranks, given that of this one, see `over_samples`."""
        return samples if self._size == 1 else self._sums(samples, name=_SAMPLES)[0]

    def weight_of(self, samples: float) -> float:
        """Return the factor of this rank's loss that makes a mean over the ranks one over the samples of all ranks.

        Args:
            samples: see `over_samples`. If no rank has any, the ranks count equally.
        """
        return SampleWeight(self, samples).factor()

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
        means: over the ranks; None: this rank steps alone.
        samples: of this rank, or what else its mean was divided by. A function is asked when the number is needed.
        is_given: by the script: then a loss of which nothing counts on any rank is 0, else the ranks count equally.
        window: the update, if the samples of all its passes count the same; else its passes do.
        factor: if it is known.
    """

    def __init__(
        self,
        means: MeanLoss | None,
        samples: float | Callable[[], float],
        *,
        is_given: bool = False,
        window: Update | None = None,
        factor: float | None = None,
    ) -> None:
        self._means, self._samples, self._is_given = means, samples, is_given
        self._window, self._factor = window, factor
        self._mean: float | None = None
        self._total_per_unit = 1.0

    @property
    def samples(self) -> float:
        """This rank's number of samples."""
        if callable(self._samples):
            self._samples = self._samples()
        return self._samples

    def factor(self, loss: Callable[[], float] | None = None) -> float:
        """Return the factor of the loss. Collective at the first call.

        Args:
            loss: returns the whole loss, without the factor; None: it is not known yet.

        Raises:
            UsageError: on all ranks: a number of samples that the script gives is negative or not finite. See also
                `Update.weigh`.
        """
        if self._factor is None:
            if loss is None:
                total = self.total()
            else:
                self._mean, total = self._over_samples(loss())
            if self._window is not None:
                divisor = self._window.weigh(total)
                self._total_per_unit = total / divisor or 1.0
            else:
                divisor = total
            size = 1 if self._means is None else self._means.size
            self._factor = self.samples * size / divisor if divisor else 0.0 if self._is_given else 1.0
        return self._factor

    def count(self, samples: float) -> None:
        """Let this be the number of samples: a compiled program has found it while it computed the loss."""
        self._samples = samples

    def take(self, factor: float) -> None:
        """Let this be the factor: a compiled program has found it while it computed the loss."""
        self._factor = factor

    def total(self) -> float:
        """Return the number of samples of all ranks. Collective."""
        return self._checked(self._sent if self._means is None else self._means.total(self._sent))

    def mean(self, loss: Callable[[], float]) -> float:
        """Return the mean over the samples of all ranks. Collective.

        Args:
            loss: returns this rank's loss times the factor; not called where the mean is known.
        """
        if self._mean is not None:
            return self._mean
        own = self.without_unit(loss())
        return own if self._means is None else self._means.of_all(own)

    def without_unit(self, mean: float) -> float:
        """Return the mean over the samples of all ranks, given the mean over the ranks of loss times factor."""
        return mean / self._total_per_unit

    def mean_without_factor(self, loss: float) -> float:
        """Return the mean over the samples of all ranks of a loss that has no factor. Collective."""
        return self._over_samples(loss)[0]

    def _over_samples(self, loss: float) -> tuple[float, float]:
        if self._is_given and not self.samples:
            loss = 0.0
        if self._means is None:
            return loss, self._checked(self._sent)
        mean, total = self._means.over_samples(loss, self._sent)
        return mean, self._checked(total)

    @property
    def _sent(self) -> float:
        """This rank's number, as the others learn it: that it is wrong, if it is."""
        return self.samples if self._is_valid else math.nan

    @property
    def _is_valid(self) -> bool:
        return not self._is_given or 0 <= self.samples < math.inf

    def _checked(self, total: float) -> float:
        if self._is_given and not 0 <= total < math.inf:
            found = "of another rank is negative or not finite" if self._is_valid else f"of this rank is {self.samples}"
            raise UsageError(f"the weight of a loss is the number of samples or tokens that count, and that {found}")
        return total
