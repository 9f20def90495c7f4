"""Programs of JAX (jaxprs), for strategies that compute a traced loss in another way, equation by equation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core

CALLS = ("jit", "pjit", "closed_call", "core_call")
"""The operations that call a function; see `inlined`."""


def value_of(atom: Any, values: dict[Any, Any]) -> Any:
    """Return the value of a literal, or of a variable, by which it is found."""
    return atom.val if isinstance(atom, core.Literal) else values[atom]


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Return those that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def bind_equation(equation: Any, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """Return the results of an equation's operation on operands, with some of its parameters changed."""
    parameters = equation.primitive.get_bind_params({**equation.params, **changed})
    with equation.ctx.manager:
        results = equation.primitive.bind(*operands, **parameters)
    return list(results) if equation.primitive.multiple_results else [results]


def evaluate(equations: Iterable[Any], values: dict[Any, Any], made: dict[Any, Any] | None = None) -> None:
    """Evaluate equations.

    Args:
        equations: in order.
        values: by variable. The results are added.
        made: the results are added here, too.
    """
    for equation in equations:
        operands = [value_of(atom, values) for atom in equation.invars]
        results = dict(zip(equation.outvars, bind_equation(equation, operands), strict=True))
        values.update(results)
        if made is not None:
            made.update(results)


def inlined(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Return the results of a program, with the functions that it calls evaluated in their place.

    `jax.make_jaxpr` of this is the program without calls.
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))
    for equation in jaxpr.eqns:
        operands = [value_of(atom, values) for atom in equation.invars]
        if equation.primitive.name in CALLS and "jaxpr" in equation.params:
            inner = equation.params["jaxpr"]
            results = inlined(inner.jaxpr, inner.consts, operands)
        else:
            results = bind_equation(equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
    return [value_of(atom, values) for atom in jaxpr.outvars]
