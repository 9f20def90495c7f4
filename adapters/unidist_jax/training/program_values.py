"""The values that a function computes, as a graph: what each was computed from, through inner compiled functions.

Relies on the form of jaxprs, which JAX does not promise to keep, and on `jax.extend.core` (`Literal`, `ClosedJaxpr`,
`jaxpr_as_fun`), in 0.10 and later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

__all__ = ["Value", "computed", "value_of"]

_CALLS = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "checkpoint", "remat", "remat2"), "jaxpr"),
    **dict.fromkeys(("core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}
"""Primitives that call a function, and the parameter that has it."""


class Value:
    """A value of a function's computation.

    Args:
        number: of this value; equal for equal computations from the batch alone.
        shape: its dims.
        of_params: it depends on the parameters.
        of_batch: it depends on the batch.
        equation: of the jaxpr that computes it; None: it is given.
        jaxpr: that one.
        operands: of the equation.
        place: among the equation's results; of one that is given, among the leaves of the batch.
        constant: its value, if it is one.
    """

    def __init__(
        self,
        number: int,
        shape: tuple[int, ...],
        *,
        of_params: bool = False,
        of_batch: bool = False,
        equation: Any = None,
        jaxpr: Any = None,
        operands: Sequence[Value] = (),
        place: int = 0,
        constant: Any = None,
    ) -> None:
        self.number, self.shape = number, shape
        self.of_params, self.of_batch = of_params, of_batch
        self.equation, self.jaxpr, self.operands, self.place = equation, jaxpr, operands, place
        self.constant = constant

    @property
    def primitive(self) -> str:
        """The name of the primitive that computes it; "" if it is given."""
        return "" if self.equation is None else str(self.equation.primitive.name)

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters of that primitive."""
        params: Mapping[str, Any] = self.equation.params
        return params

    @property
    def program(self) -> Callable[..., Sequence[Any]]:
        """A function of the operands' values that returns the results of the equation."""
        atoms = self.equation.invars
        variables = [atom for atom in atoms if not isinstance(atom, core.Literal)]
        alone = self.jaxpr.replace(constvars=[], invars=variables, outvars=self.equation.outvars, eqns=[self.equation])
        run: Callable[..., Sequence[Any]] = core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))
        return lambda *values: run(
            *(value for atom, value in zip(atoms, values, strict=True) if not isinstance(atom, core.Literal))
        )

    @property
    def is_leaf(self) -> bool:
        """Whether it is given."""
        return self.equation is None

    def ancestors(self) -> Iterator[Value]:
        """Iterate over the values that it was computed from, each once, without itself."""
        seen, left = {self.number}, list(self.operands)
        while left:
            value = left.pop()
            if value.number not in seen:
                seen.add(value.number)
                left.extend(value.operands)
                yield value


def value_of(function: Callable[[Any, Any], Any], params: Any, batch: Any) -> Value:
    """Return the result of a function that returns a scalar. It is traced once, and not compiled.

    Args:
        function: of the parameters and the batch.
        params: a tree of arrays, or of shapes and types.
        batch: likewise.
    """
    closed = jax.make_jaxpr(function)(params, batch)
    reader = _Reader()
    num_params = len(jax.tree.leaves(params))
    given = [
        reader.new(
            tuple(variable.aval.shape),
            of_params=place < num_params,
            of_batch=place >= num_params,
            place=place - num_params,
        )
        for place, variable in enumerate(closed.jaxpr.invars)
    ]
    [result] = reader.results(closed.jaxpr, closed.consts, given)
    return result


def computed(values: Sequence[Value], leaves: Sequence[Any]) -> list[Any]:
    """Compute values that depend on the batch alone, at once or while a function is traced.

    Args:
        values: of `value_of`.
        leaves: of the batch.
    """
    needed = {value.number: value for value in values}
    for value in values:
        needed.update((each.number, each) for each in value.ancestors())
    found: dict[int, Any] = {}
    for number in sorted(needed):  # operands have smaller numbers
        value = needed[number]
        if value.is_leaf:
            found[number] = leaves[value.place] if value.of_batch else value.constant
            continue
        found[number] = value.program(*(found[each.number] for each in value.operands))[value.place]
    return [found[value.number] for value in values]


class _Reader:
    """Makes values of the equations of a jaxpr."""

    def __init__(self) -> None:
        self._count = 0
        self._known: dict[Any, Value] = {}

    def new(self, shape: tuple[int, ...], **options: Any) -> Value:
        self._count += 1
        return Value(self._count, shape, **options)

    def results(self, jaxpr: Any, consts: Sequence[Any], given: Sequence[Value]) -> list[Value]:
        values = dict(zip(jaxpr.invars, given, strict=True))
        values.update(zip(jaxpr.constvars, map(self._constant, consts), strict=True))

        def read(atom: Any) -> Value:
            if isinstance(atom, core.Literal):
                return self._constant(np.asarray(atom.val, atom.aval.dtype))
            return values[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            called = equation.params.get(_CALLS.get(equation.primitive.name, ""))
            if called is not None and len(getattr(called, "jaxpr", called).invars) == len(operands):
                inner, constants = (called.jaxpr, called.consts) if hasattr(called, "consts") else (called, ())
                found = self.results(inner, constants, operands)
            else:
                found = [self._computed(jaxpr, equation, operands, place) for place in range(len(equation.outvars))]
            values.update(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _computed(self, jaxpr: Any, equation: Any, operands: Sequence[Value], place: int) -> Value:
        of_params = any(each.of_params for each in operands)
        key = None
        if not of_params:
            key = equation.primitive.name, str(equation.params), tuple(each.number for each in operands), place
            if key in self._known:
                return self._known[key]
        value = self.new(
            tuple(getattr(equation.outvars[place].aval, "shape", ())),
            of_params=of_params,
            of_batch=any(each.of_batch for each in operands),
            equation=equation,
            jaxpr=jaxpr,
            operands=operands,
            place=place,
        )
        if key is not None:
            self._known[key] = value
        return value

    def _constant(self, constant: Any) -> Value:
        is_number = isinstance(constant, np.ndarray) and not constant.ndim
        key = ("number", str(constant.dtype), constant.tobytes()) if is_number else ("array", id(constant))
        if key not in self._known:
            self._known[key] = self.new(tuple(constant.shape), constant=constant)
        return self._known[key]
