"""Evaluates a program of JAX on this rank's parts of its arrays: cut dims are followed from operation to operation.

An array is whole, the same on every rank of the axis, or cut along one dim. `rules` says for an operation what it makes
of parts. Where it has no rule, or the parts do not fit together, the operands are gathered first, which costs time and
changes no number. Whole arrays have whole gradients, the same on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax.numpy as jnp

from unidist_jax.models import at_line_of, bind_equation, is_literal, line_of
from unidist_tensor_parallel._jax.axis import TensorAxis
from unidist_tensor_parallel.layout.cuts import Cut


class CutValue(NamedTuple):
    """An array of the program.

    Args:
        array: this rank's part of it, or all of it.
        cut: None: it is whole.
        shape: of the whole array.
        is_constant: it does not depend on the parameters, so it has no gradient.
    """

    array: Any
    cut: Cut | None
    shape: tuple[int, ...]
    is_constant: bool = False


class NeedsExchange(Exception):
    """A part of a program that is to be evaluated without exchanges cannot be."""


class Gathered(NamedTuple):
    """An operation whose operands were gathered.

    Args:
        operation: of JAX.
        where: line of the script.
    """

    operation: str
    where: str


class Propagation:
    """One evaluation of a program.

    Args:
        axis: the exchanges; the ranks issue the same ones in the same order.
        rules: by the name of the operation: what it makes of parts, or None to gather its operands.

    Attributes:
        gathered: how often operands were gathered, by operation.
        sums: number of sums over the ranks.
        may_exchange: False within `without_exchanges`.
    """

    def __init__(self, axis: TensorAxis, rules: Rules) -> None:
        self.rank = axis.rank
        self.gathered: Counter[Gathered] = Counter()
        self.sums = 0
        self._axis = axis
        self._rules = rules
        self.may_exchange = True

    def run(self, program: Any, constants: Sequence[Any], operands: Sequence[CutValue]) -> list[CutValue]:
        """Return the results of a program (a `Jaxpr`).

        Args:
            program: what is evaluated.
            constants: its constants, whole. They do not depend on the parameters.
            operands: one for each of its inputs.
        """
        known: dict[Any, CutValue] = {}

        def read(atom: Any) -> CutValue:
            return constant_value(atom.val) if is_literal(atom) else known[atom]

        # From JAX 0.11 on, constants of a rule for gradients are its first inputs.
        places = (*program.constvars, *program.invars)
        known.update(zip(places, (*map(constant_value, constants), *operands), strict=True))
        for equation in program.eqns:
            with at_line_of(equation):
                results = self._evaluated(equation, [read(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in program.outvars]

    def _evaluated(self, equation: Any, values: Sequence[CutValue]) -> list[CutValue]:
        if all(value.cut is None for value in values):
            return self._on_whole(equation, values)
        rule = self._rules.get(equation.primitive.name)
        results = None if rule is None else rule(self, equation, values)
        if results is not None:
            return results
        wholes = [self.whole(value) for value in values]
        self.gathered[Gathered(equation.primitive.name, line_of(equation))] += 1
        return self._on_whole(equation, wholes)

    def _on_whole(self, equation: Any, values: Sequence[CutValue]) -> list[CutValue]:
        is_constant = all(value.is_constant for value in values)
        arrays = self.bind(equation, [value.array for value in values])
        return [CutValue(array, None, tuple(jnp.shape(array)), is_constant) for array in arrays]

    def bind(self, equation: Any, arrays: Sequence[Any], **changed: Any) -> list[Any]:
        """Return the results of the equation's operation on arrays, with some of its parameters changed."""
        return bind_equation(equation, arrays, **changed)

    def whole(self, value: CutValue) -> CutValue:
        """Return a value as a whole array; gathers its parts."""
        if value.cut is None:
            return value
        self._exchanges()
        return CutValue(self._axis.gather(value.array, value.cut), None, value.shape)

    def split(self, value: CutValue, cut: Cut) -> CutValue:
        """Return a whole value as parts, cut in this way."""
        if value.is_constant:
            return value._replace(array=self._axis.own(value.array, cut), cut=cut)
        self._exchanges()  # of its gradient
        return CutValue(self._axis.split(value.array, cut), cut, value.shape)

    def like(self, value: CutValue, cut: Cut) -> CutValue:
        """Return a value as parts, cut in this way, however it comes."""
        return value if value.cut == cut else self.split(self.whole(value), cut)

    def enter(self, value: CutValue) -> CutValue:
        """Return a whole value for use beside parts: it gets the sum of the ranks' gradients."""
        if not value.is_constant and jnp.issubdtype(value.array.dtype, jnp.inexact):
            self._exchanges()
            return value._replace(array=self._axis.enter(value.array))
        return value

    def summed(self, array: Any) -> CutValue:
        """Return the sum of the ranks' arrays as a whole value."""
        self._exchanges()
        self.sums += 1
        return whole_value(self._axis.leave(array))

    def largest(self, array: Any, axes: Sequence[int]) -> CutValue:
        """Return the maximum of parts along dims, one of which is cut, as a whole value."""
        self._exchanges()
        self.sums += 1
        return whole_value(self._axis.largest(array, axes))

    def _exchanges(self) -> None:
        if not self.may_exchange:
            raise NeedsExchange

    @contextmanager
    def without_exchanges(self) -> Any:
        """Raise NeedsExchange where the block would exchange anything."""
        before, self.may_exchange = self.may_exchange, False
        try:
            yield
        finally:
            self.may_exchange = before


Rule = Callable[[Propagation, Any, Sequence[CutValue]], list[CutValue] | None]
Rules = dict[str, Rule]


def whole_value(array: Any) -> CutValue:
    """Return a whole array as a value."""
    return CutValue(array, None, tuple(jnp.shape(array)))


def constant_value(array: Any) -> CutValue:
    """Return a whole array that does not depend on the parameters as a value."""
    return whole_value(array)._replace(is_constant=True)


def local_shape(shape: Sequence[int], cut: Cut | None, rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's part of an array."""
    if cut is None:
        return tuple(shape)
    return (*shape[: cut.dim], cut.counts[rank], *shape[cut.dim + 1 :])
