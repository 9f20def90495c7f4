"""The number by which a loss function divides the sum of a batch's losses, found in its jaxpr.

A mean over samples divides by a constant. `(losses * mask).sum() / mask.sum()` divides by a sum over the batch, of
which each rank has its own: with it as the rank's weight, the mean over the ranks is that of one process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unidist.runtime import context
from unidist_jax.operations import allreduce
from unidist_jax.training.program_values import Value, computed, value_of

__all__ = ["LossDivisor", "quotient"]

_log = logging.getLogger("unidist")

_ADVICE = (
    "A rank's loss has one weight, so losses and gradients are not those of one process. Compute the divisor d of this "
    "rank's batch outside of loss_fn, give it ud.allreduce(d, op=ud.Sum) / ud.size() with the batch, and divide by that"
)
_MOST_STEPS = 10_000
"""By which a loss is followed back: products of products have many terms."""
_SAME = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reduce_precision", "reshape", "squeeze"}
)
_LINEAR = _SAME | {"neg", "reduce_sum", "transpose"}


class LossDivisor:
    """The divisor of a loss function, for batches of any shapes; each kind is looked at once.

    Args:
        loss_fn: `loss_fn(params, (batch, state))` returns a scalar.
        params: a tree of arrays like the parameters.
        given: the script's function of the batch that returns the divisor; None: it is found.
    """

    def __init__(
        self, loss_fn: Callable[[Any, Any], Any], params: Any, given: Callable[..., Any] | None = None
    ) -> None:
        self._given = given
        self._loss_fn = loss_fn
        self._params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        self._found: dict[Any, Callable[[Any, Any], Any] | None] = {}
        self._has_warned = False

    def function_for(self, batch: Any, state: Any) -> Callable[[Any, Any], Any] | None:
        """Return what computes the divisor of a batch from batch and state, a scalar.

        None: it is a constant, or no weight of a rank is right, of which a warning says why, once.
        """
        if self._given is not None:
            given = self._given
            return lambda batch, _: given(*batch)
        leaves, structure = jax.tree.flatten((batch, state))
        key = structure, tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
        if key not in self._found:
            self._found[key] = self._look(batch, state)
        return self._found[key]

    def weight_in_program(self, batch: Any, state: Any) -> Any:
        """Return the weight of this rank's loss in a program over all ranks, where they have equally many samples."""
        compute = self.function_for(batch, state)
        if compute is None:
            return None
        own = jnp.asarray(compute(batch, state), float)
        mean = allreduce(own, name="divisor of a loss")
        return jnp.where(mean == 0, 1 if self._given is None else 0, own / jnp.where(mean == 0, 1, mean))

    def check_micro_batches(self, batch: Any, state: Any) -> None:
        """Warn, at the first batch, where micro-batches weigh as many samples as they have, and that is wrong."""
        if self._given is None and not self._found and self.function_for(batch, state) is not None:
            self._warn("the loss of TrainStep is divided by a sum over the batch, which differs between micro-batches")

    def _warn(self, problem: str) -> None:
        if not self._has_warned and context.current().topology.rank == 0:
            _log.warning("%s. %s", problem, _ADVICE)
        self._has_warned = True

    def _look(self, batch: Any, state: Any) -> Callable[[Any, Any], Any] | None:
        try:
            loss = value_of(self._loss_fn, self._params, (batch, state))
        except Exception:  # the step raises it, and says where
            _log.debug("the loss function could not be looked at", exc_info=True)
            return None
        divisor, problem = quotient(loss)
        if problem:
            self._warn(problem)
        return None if divisor is None else jax.jit(lambda batch, state: divisor(jax.tree.leaves((batch, state))))


def quotient(loss: Value) -> tuple[Callable[[Sequence[Any]], Any] | None, str]:
    """Return what computes the divisor of a loss from the leaves of a batch, and what is wrong with the loss.

    Args:
        loss: the result of a loss function.

    Returns:
        The function, or None: the divisor is a constant, or there is no one divisor. A problem in words, or "".
    """
    terms = [term for term in _Terms().of(loss, _Term(of_batch=False)) if term.of_batch]
    problems = [term.problem for term in terms if term.problem]
    if problems:
        return None, problems[0]
    kinds = {tuple(sorted(each.number for each in term.divisors)) for term in terms}
    if len(kinds) > 1:
        return None, "the loss of TrainStep is a sum of terms that are divided by different sums over the batch"
    if kinds <= {()}:
        return None, ""
    divisors, factor = terms[0].divisors, terms[0].factor

    def compute(leaves: Sequence[Any]) -> Any:
        found = computed([*divisors, *map(_unguarded, divisors)], leaves)
        total = jnp.asarray(factor, float)
        for divided_by, counted in zip(found[: len(divisors)], found[len(divisors) :], strict=True):
            total = total * jnp.where(counted == 0, 0, divided_by)  # where nothing counts, a guard divides by another
        return jnp.reshape(total, ())

    return compute, ""


class _Term:
    """One of the terms that add up to a loss.

    Args:
        of_batch: it depends on the batch.
        divisors: sums over the batch by which it is divided.
        factor: the constant by which it is divided.
        problem: why no weight is right; "": one is.
    """

    def __init__(
        self, *, of_batch: bool, divisors: tuple[Value, ...] = (), factor: float = 1.0, problem: str = ""
    ) -> None:
        self.of_batch, self.divisors, self.factor, self.problem = of_batch, divisors, factor, problem

    def also(
        self, *, of_batch: bool = False, divisors: tuple[Value, ...] = (), factor: float = 1.0, problem: str = ""
    ) -> _Term:
        return _Term(
            of_batch=self.of_batch or of_batch,
            divisors=self.divisors + divisors,
            factor=self.factor * factor,
            problem=self.problem or problem,
        )


class _Terms:
    """Follows a loss back through what is linear, as far as divisions by a scalar may be found."""

    def __init__(self) -> None:
        self._steps = 0

    def of(self, value: Value, term: _Term) -> list[_Term]:
        """Return the terms of a value, each with what is known of `term`, of which it is a factor."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            return [term.also(of_batch=value.of_batch)]
        name, operands = value.primitive, value.operands
        if not value.of_batch:
            return [term.also(factor=1 / _constant(value))]
        if name in _LINEAR:
            return self.of(operands[0], term)
        if name in ("add", "sub") and not value.shape:
            return [each for operand in operands for each in self.of(operand, term)]
        if name == "mul" or (name == "dot_general" and not value.shape):
            for_both = [term.also(of_batch=True)]
            for operand in operands:
                if name == "mul" or not operand.of_params:
                    for_both = [each for before in for_both for each in self.of(operand, before)]
            return for_both
        if name == "div":
            return self._quotient(operands[0], operands[1], term, is_scalar=not value.shape)
        if name == "integer_pow" and value.params["y"] == -1:
            return self._quotient(None, operands[0], term, is_scalar=not value.shape)
        if name == "select_n":
            cases = _not_constant(operands[1:])
            if len(cases) == 1:
                return self.of(cases[0], term)
        return [term.also(of_batch=True)]

    def _quotient(self, above: Value | None, below: Value, term: _Term, *, is_scalar: bool) -> list[_Term]:
        divisor = _same(below)
        if not below.of_batch:
            term = term.also(factor=_constant(below))
        elif divisor.shape:  # of each sample its own: of a mean over samples
            term = term.also(of_batch=True)
        elif not _is_sum(divisor):
            what = "the loss of TrainStep is divided by a number that follows from the batch, and is no sum over it"
            term = term.also(of_batch=True, problem=what if is_scalar else "")
        elif divisor.of_params:
            what = "the loss of TrainStep is divided by a sum over the batch that depends on the parameters, too"
            term = term.also(of_batch=True, problem=what)
        else:
            term = term.also(of_batch=True, divisors=(divisor,))
        return [term] if above is None else self.of(above, term)


def _constant(value: Value) -> float:
    """Return the absolute value of a scalar constant; 1 for anything else, and for 0."""
    constant = _same(value).constant
    return abs(float(constant)) or 1.0 if constant is not None and np.ndim(constant) == 0 else 1.0


def _same(value: Value) -> Value:
    """Return the value that another one consists of, cast or brought into another shape."""
    while value.primitive in _SAME:
        value = value.operands[0]
    return value


def _not_constant(values: Sequence[Value]) -> list[Value]:
    return [each for each in values if each.of_batch or each.of_params]


def _guarded(value: Value) -> Value | None:
    """Return what a value is where a guard against division by 0 does not apply; None: it has no guard."""
    given = value.operands[1:] if value.primitive == "select_n" else value.operands
    left = _not_constant(given)
    if value.primitive in ("max", "clamp", "select_n", "add") and len(left) == 1 < len(given):
        return left[0]
    return None


def _unguarded(value: Value) -> Value:
    value = _same(value)
    while (inner := _guarded(value)) is not None:
        value = _same(inner)
    return value


def _is_sum(value: Value) -> bool:
    """Return whether the value for the ranks' batches together is the sum of the ranks' values."""
    value = _unguarded(value)
    if value.is_leaf:
        return not value.shape  # a number that the script has counted
    if value.primitive in ("reduce_sum", "dot_general"):
        return not value.shape and not any(_is_statistic(each) for each in value.ancestors())
    if value.primitive in ("add", "sub"):
        return all(_is_sum(each) or not each.of_batch for each in value.operands)
    if value.primitive == "mul":
        left = [each for each in value.operands if each.of_batch]
        return len(left) == 1 and _is_sum(left[0])
    return value.primitive == "div" and not value.operands[1].of_batch and _is_sum(value.operands[0])


def _is_statistic(value: Value) -> bool:
    """Return whether a value is one number for a whole batch, as its mean is."""
    return value.of_batch and not value.shape and value.primitive.startswith(("reduce_", "dot_general"))
