"""Post-processing of reduced gradients before the inner step: unscale, check for overflow, clip, in this order.

Framework-free: the rules work on the memory of the gradients (`GradientExchange.reduced`), through the arithmetic of
the `Framework`, so they apply to whole gradients and to shards. "The gradient" is always that of the whole model, with
each element counted once. Each rank computes on its part, and one number is exchanged for each mesh axis over which
the gradient is divided.
"""

from __future__ import annotations

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp
from unidist.errors import UsageError
from unidist.optim.loss_scaling import LossScaler

if TYPE_CHECKING:
    from unidist.framework import Framework
    from unidist.gradients.interface import ReducedGradients
    from unidist.optim.nonfinite import NonfiniteWatch

_EPSILON = 1e-6
"""Added to a norm before it divides, as `torch.nn.utils.clip_grad_norm_` does."""

_NEVER_SCALED, _SCALED, _OVERFLOWED = range(3)
"""The findings of a rank in an update with a scaled loss; the largest of all ranks counts."""


class GradientRule(ABC):
    """Changes the gradient of one optimizer. A trivial implementation calls nothing."""

    @abstractmethod
    def apply(self, gradient: WholeGradient) -> None:
        """Change the gradient; it is unscaled, and finite where the loss is scaled.

        Called once for each update, on every rank of the model, so that the communication of `gradient`'s methods
        matches.
        """


class NormRule(GradientRule):
    """Scales the gradient down where its norm is above a limit (Pascanu et al. 2013, https://arxiv.org/abs/1211.5063).

    Same numbers as `torch.nn.utils.clip_grad_norm_` in one process.

    Args:
        limit: the largest norm, above 0.
        order: of the norm, above 0; `math.inf` for the largest absolute value.

    Attributes:
        norm: of the last gradient, before it was scaled; equal on every rank.
    """

    def __init__(self, limit: float, order: float = 2.0) -> None:
        self.limit = limit
        self.order = order
        self.norm = 0.0

    @override
    def apply(self, gradient: WholeGradient) -> None:
        self.norm = gradient.norm(self.order)
        factor = self.limit / (self.norm + _EPSILON)
        if not factor >= 1.0:  # NaN too: what is not finite spreads, as it does in one process
            gradient.multiply(factor)


class ValueRule(GradientRule):
    """Moves each element of the gradient into [-limit, limit].

    Args:
        limit: above 0.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit

    @override
    def apply(self, gradient: WholeGradient) -> None:
        gradient.clamp(self.limit)


class _Part:
    """The reduced gradients of one exchange; `factor` is still to be applied to its memory."""

    def __init__(self, framework: Framework, reduced: ReducedGradients, factor: float) -> None:
        self.reduced = reduced
        self.factor = factor
        self._framework = framework
        self._norms: dict[float, list[float]] = {}

    def norms(self, order: float) -> list[float]:
        """Return the norm of each piece, multiplied by the factor. Memory is read once for each order."""
        if order not in self._norms:
            found = iter(self._framework.norms([memory for memory in self.reduced.memory if memory.count], order))
            self._norms[order] = [next(found) if memory.count else 0.0 for memory in self.reduced.memory]
        return [found * abs(self.factor) for found in self._norms[order]]

    def clamp(self, limit: float) -> None:
        """Move every element, multiplied by the factor, into [-limit, limit]."""
        if self.factor == 0.0:
            return  # all are
        self._norms.clear()
        for memory in self.reduced.memory:
            if memory.dtype.is_complex:
                raise UsageError("complex gradients cannot be clipped by value; use clip_norm")
            if memory.count:
                self._framework.clamp(memory, limit / abs(self.factor))

    def apply_factor(self) -> float:
        """Multiply the memory by the factor, unless the inner step will; return the factor still to be applied."""
        if self.reduced.deferred or self.factor == 1.0:
            return self.factor
        for memory in self.reduced.memory:
            if memory.count:
                self._framework.multiply(memory, self.factor)
        return 1.0


class WholeGradient:
    """The gradient of the whole model, of which this rank holds a part. Made by `GradientRules`.

    Args:
        parts: the part on this rank.
        model_axes: communicators along the mesh axes that the model is divided over.
    """

    def __init__(self, parts: Sequence[_Part], model_axes: Sequence[Communicator]) -> None:
        self._parts = parts
        self._model_axes = model_axes
        self._is_skipped = False

    @property
    def is_skipped(self) -> bool:
        """Whether `skip` was called."""
        return self._is_skipped

    def skip(self) -> None:
        """Leave the update out, as after an overflow of `fp16`. Call it on every rank, or on none.

        Rules after this one do not see the gradient.
        """
        self._is_skipped = True

    def norm(self, order: float) -> float:
        """Return the `order`-norm over all elements, equal on every rank. Collective.

        Added up in float64.

        Args:
            order: above 0; `math.inf` for the largest absolute value.
        """
        if math.isinf(order):
            return self._total(lambda part: functools.reduce(_maximum, part.norms(order), 0.0), ReduceOp.MAX)
        total = self._total(lambda part: _power_sum(part, order), ReduceOp.SUM)
        return _power(total, 1.0 / order)

    def multiply(self, factor: float) -> None:
        """Multiply every element. The multiplication is done once, after all rules were applied."""
        for part in self._parts:
            part.factor *= factor

    def clamp(self, limit: float) -> None:
        """Move every element into [-limit, limit]. The limit is above 0; gradients are real."""
        for part in self._parts:
            part.clamp(limit)

    def is_finite(self) -> bool:
        """Return whether all elements on this rank are finite. Not collective."""
        return all(math.isfinite(norm) for part in self._parts for norm in part.norms(2.0))

    def _total(self, measure: Callable[[_Part], float], op: ReduceOp) -> float:
        """Return a measure of all parts, over the ranks that hold pieces of them, then along the model's axes."""
        join = _maximum if op is ReduceOp.MAX else operator.add
        total = 0.0
        divided: dict[tuple[int, ...], tuple[Communicator, float]] = {}
        for part in self._parts:
            over = part.reduced.divided_over
            if over is None:
                total = join(total, measure(part))
            else:
                first, known = divided.get(over.members, (over, 0.0))
                divided[over.members] = (first, join(known, measure(part)))
        for over, own in divided.values():
            total = join(total, _reduced(own, over, op))
        for axis in self._model_axes:
            total = _reduced(total, axis, op)
        return total


class GradientRules:
    """The rules of one optimizer.

    Args:
        framework: does arithmetic on gradients.
        rules: applied in this order, after unscaling and the check for overflows.
        scaler: of the loss; None: it is not scaled, and overflows are not checked for.
        everyone: over all ranks that hold a part of the gradient or update with it; needed with a scaler.
        watch: looks for gradients that are not finite; None: nobody does, or the scaler.
        model_axes: along the mesh axes that the model is divided over.
    """

    def __init__(
        self,
        framework: Framework,
        rules: Sequence[GradientRule],
        *,
        scaler: LossScaler | None = None,
        everyone: Communicator | None = None,
        watch: NonfiniteWatch | None = None,
        model_axes: Sequence[Communicator] = (),
    ) -> None:
        self.scaler = scaler
        self.watch = watch
        self._framework = framework
        self._rules = tuple(rules)
        self._everyone = everyone
        self._model_axes = tuple(model_axes)

    def apply(
        self, gradients: Sequence[ReducedGradients], factors: Sequence[float], *, step: int = 0
    ) -> list[float] | None:
        """Change the gradients in place. Collective over the ranks of the model.

        Args:
            gradients: the reduced gradients.
            factors: for each of them, the factor that is still to be applied: they are not unscaled yet.
            step: number of the update, from 1, for the texts of errors.

        Returns:
            For each of them the factor that is still to be applied, 1 if it was applied here; None if every rank must
            skip the update: a gradient is not finite on some rank, or a rule says so.
        """
        parts = [_Part(self._framework, reduced, factor) for reduced, factor in zip(gradients, factors, strict=True)]
        whole = WholeGradient(parts, self._model_axes)
        if self.scaler is not None:
            overflowed = self._has_overflowed(whole, self.scaler)
            self.scaler.update(overflowed=overflowed)
            if overflowed:
                return None
        if self.watch is not None and self.watch.is_skipped(gradients, step):
            return None
        for rule in self._rules:
            rule.apply(whole)
            if whole.is_skipped:
                return None
        return [part.apply_factor() for part in parts]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return self.scaler is None and self.watch is None and not self._rules

    def apply_once(
        self, rule: GradientRule, gradients: Sequence[ReducedGradients], factors: Sequence[float]
    ) -> list[float]:
        """Apply another rule after `apply`, whose result is `factors`. Collective like `apply`."""
        parts = [_Part(self._framework, reduced, factor) for reduced, factor in zip(gradients, factors, strict=True)]
        rule.apply(WholeGradient(parts, self._model_axes))
        return [part.apply_factor() for part in parts]

    def close(self) -> None:
        """Release communicators. Idempotent."""
        for communicator in (self._everyone, *self._model_axes):
            if communicator is not None:
                communicator.close()

    def _has_overflowed(self, gradient: WholeGradient, scaler: LossScaler) -> bool:
        """Ask all ranks: if only some of them stepped, their parameters would differ from then on."""
        found = _OVERFLOWED if not gradient.is_finite() else _SCALED if scaler.was_applied else _NEVER_SCALED
        if self._everyone is not None and self._everyone.size > 1:
            exchanged = Buffer.allocate(1, DType.UINT8)
            exchanged.bytes()[0] = found
            self._everyone.allreduce(exchanged, exchanged, op=ReduceOp.MAX).wait()
            found = exchanged.bytes()[0]
        if found == _NEVER_SCALED:
            raise UsageError(
                f"the gradients are to be divided by the loss scale, {scaler.scale:g}, but no loss was multiplied by "
                "it. PyTorch: compute the loss from what the model returns when it is called. Keras: in a loop of your "
                "own, take the gradients of optimizer.scale_loss(loss)"
            )
        return found == _OVERFLOWED


def _reduced(value: float, over: Communicator, op: ReduceOp) -> float:
    """Return the sum or the largest of a number of all ranks. Collective."""
    if over.size == 1:
        return value
    exchanged = Buffer.allocate(1, DType.FLOAT64)
    number = exchanged.bytes().cast("d")
    number[0] = value
    over.allreduce(exchanged, exchanged, op=op).wait()
    return float(number[0])


def _power_sum(part: _Part, order: float) -> float:
    """Return this rank's share of the sum of powers; elements on several ranks are counted once by all together."""
    return sum(
        _power(norm, order) / copies for norm, copies in zip(part.norms(order), part.reduced.num_copies, strict=True)
    )


def _maximum(a: float, b: float) -> float:
    """Return the larger number; NaN if either is NaN."""
    return a if a > b or math.isnan(a) else b


def _power(value: float, exponent: float) -> float:
    try:
        return float(value**exponent)
    except OverflowError:
        return math.inf
