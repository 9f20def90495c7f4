"""Post-processing of reduced gradients before the inner step: unscale, check for overflow, clip, in this order.

Framework-free: the rules work on the memory of the gradients (`GradientExchange.reduced`), through the arithmetic of
the `Framework`, so they apply to whole gradients and to shards. "The gradient" is always that of the whole model, with
each element counted once. Each rank computes on its part, and one number is exchanged for each mesh axis over which
the gradient is divided.
"""

from __future__ import annotations

import array
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
from unidist.negotiation.objects import gather_objects
from unidist.optim.loss_scaling import LossScaler

if TYPE_CHECKING:
    from unidist.framework import Framework
    from unidist.gradients.interface import ReducedGradients
    from unidist.gradients.pieces import GradientPiece
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
        self._pieces: Sequence[GradientPiece] | None = None

    def pieces(self) -> Sequence[GradientPiece]:
        """Return the pieces by parameter, with the factor applied to the memory: elements are read and written."""
        if self._pieces is None:
            if self.reduced.pieces is None:
                raise UsageError(
                    "a rule asks for the gradient of each parameter, and here are sparse ones, of which there are rows "
                    "alone. Make embeddings with sparse=False, or leave the rule out"
                )
            if self.factor != 1.0:
                self._check_unscaled()
                self._multiply(self.factor)
                self.factor = 1.0
            self._pieces = self.reduced.pieces()
        return self._pieces

    def _check_unscaled(self) -> None:
        if self.reduced.deferred and any(memory.dtype is DType.FLOAT16 for memory in self.reduced.memory):
            raise UsageError(
                "a rule asks for the elements of float16 gradients, which are still multiplied by the loss scale: "
                "unscaled, small ones are lost. Use precision=bf16, or leave the rule out"
            )

    def norms(self, order: float) -> list[float]:
        """Return the norm of each piece, multiplied by the factor. Memory is read once for each order."""
        if order not in self._norms or self._pieces is not None:  # who has pieces may have changed elements
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
        self._multiply(self.factor)
        return 1.0

    def _multiply(self, factor: float) -> None:
        for memory in self.reduced.memory:
            if memory.count:
                self._framework.multiply(memory, factor)


class WholeGradient:
    """The gradient of the whole model, of which this rank holds a part. Made by `GradientRules`.

    Args:
        parts: the part on this rank.
        model_axes: communicators along the mesh axes that the model is divided over.
        names: of the parameters on all ranks along these.
        step: number of the update, from 1.
        values: see `GradientRules.apply`.

    Attributes:
        step: see Args.
    """

    def __init__(
        self,
        parts: Sequence[_Part],
        model_axes: Sequence[Communicator],
        names: _Names,
        step: int,
        values: Callable[[], Sequence[Buffer]] | None,
    ) -> None:
        self._values = values
        self._parts = parts
        self._model_axes = model_axes
        self._names = names
        self._is_skipped = False
        self.step = step

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

    def pieces(self) -> list[GradientPiece]:
        """Return this rank's pieces of the gradient by parameter, to be changed in place. Not collective.

        They are whole gradients, or parts of them where gradients are divided (zero): each element is in the piece of
        one rank of those that divide them. A parameter without a gradient on any rank has no piece.

        Raises:
            UsageError: there are sparse gradients, or scaled ones of float16.
        """
        return [piece for part in self._parts for piece in part.pieces()]

    def parameters(self) -> list[Buffer]:
        """Return for each of `pieces()` the same elements of the parameter, to be read. Not collective.

        Raises:
            UsageError: this rank has no whole parameters (zero=3), or its optimizer updates copies, or the arrays are
                the script's (JAX).
            ConfigurationError: the binding gives no access to parameters, see `Update.trained`.
        """
        pieces = self.pieces()
        if self._values is None:
            raise UsageError("nobody has told the rules of this optimizer where its parameters are")
        values = self._values()
        found, first = [], 0
        for part in self._parts:
            found += [values[first + piece.number].slice(piece.start, piece.memory.count) for piece in part.pieces()]
            first += len(part.reduced.parameters)
        assert len(found) == len(pieces)
        return found

    def sums(self, values: Sequence[float]) -> list[float]:
        """Add up a number of each piece over all pieces of its parameter, on whichever rank. Collective.

        With squares of the norms of pieces it gives those of parameters: `sum(x * x)`. In float64.

        Args:
            values: one for each of `pieces()`, in that order. Every rank calls this, with pieces or without.

        Returns:
            The sum of its parameter for each piece.
        """
        given = iter(values)
        totals: dict[str, float] = {}
        for part in self._parts:
            sums = [0.0] * len(part.reduced.parameters)
            for piece in part.pieces():
                sums[piece.number] += next(given)
            if part.reduced.divided_over is not None:
                sums = _all_reduced(sums, part.reduced.divided_over, ReduceOp.SUM)
            for parameter, total in zip(part.reduced.parameters, sums, strict=True):
                totals[parameter.name] = total / parameter.copies
        if self._model_axes:
            names = self._names.everywhere(sorted(totals), self._model_axes)
            sums = [totals.get(name, 0.0) for name in names]
            for axis in self._model_axes:
                sums = _all_reduced(sums, axis, ReduceOp.SUM)
            totals = dict(zip(names, sums, strict=True))
        return [totals[piece.parameter.name] for piece in self.pieces()]

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


class _Names:
    """The names of parameters on all ranks along the axes of the model, gathered again when they have changed."""

    def __init__(self) -> None:
        self._own: list[str] = []
        self._all: list[str] = []

    def everywhere(self, own: list[str], axes: Sequence[Communicator]) -> list[str]:
        """Return the names on all ranks in one order. Collective along the axes.

        Args:
            own: this rank's.
            axes: of the model.
        """
        has_changed = float(own != self._own)
        for axis in axes:
            has_changed = _reduced(has_changed, axis, ReduceOp.MAX)
        if has_changed:
            names = set(own)
            for axis in axes:
                names.update(*gather_objects(axis, sorted(names)))
            self._own, self._all = own, sorted(names)
        return self._all


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
        self._names = _Names()

    def apply(
        self,
        gradients: Sequence[ReducedGradients],
        factors: Sequence[float],
        *,
        step: int = 0,
        values: Callable[[], Sequence[Buffer]] | None = None,
    ) -> list[float] | None:
        """Change the gradients in place. Collective over the ranks of the model.

        Args:
            gradients: the reduced gradients.
            factors: for each of them, the factor that is still to be applied: they are not unscaled yet.
            step: number of the update, from 1.
            values: returns the present value of each parameter, in the order of the gradients'; see `TrainedState`.

        Returns:
            For each of them the factor that is still to be applied, 1 if it was applied here; None if every rank must
            skip the update: a gradient is not finite on some rank, or a rule says so.
        """
        parts = [_Part(self._framework, reduced, factor) for reduced, factor in zip(gradients, factors, strict=True)]
        whole = WholeGradient(parts, self._model_axes, self._names, step, values)
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
        self,
        rule: GradientRule,
        gradients: Sequence[ReducedGradients],
        factors: Sequence[float],
        *,
        step: int = 0,
        values: Callable[[], Sequence[Buffer]] | None = None,
    ) -> list[float]:
        """Apply another rule after `apply`, whose result is `factors`. Collective like `apply`."""
        parts = [_Part(self._framework, reduced, factor) for reduced, factor in zip(gradients, factors, strict=True)]
        rule.apply(WholeGradient(parts, self._model_axes, self._names, step, values))
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
    return value if over.size == 1 else _all_reduced([value], over, op)[0]


def _all_reduced(values: Sequence[float], over: Communicator, op: ReduceOp) -> list[float]:
    """Return the sum or the largest of each number of all ranks, which have equally many. Collective."""
    if not values:
        return []
    exchanged = Buffer.allocate(len(values), DType.FLOAT64)
    numbers = exchanged.bytes().cast("d")
    numbers[:] = array.array("d", values)
    over.allreduce(exchanged, exchanged, op=op).wait()
    return [float(each) for each in numbers]


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
