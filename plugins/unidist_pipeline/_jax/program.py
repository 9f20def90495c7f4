"""The loss function of a script as a list of equations (a jaxpr of JAX)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from unidist.errors import UsageError

_CALLS = ("jit", "pjit", "closed_call", "core_call")


@dataclass(frozen=True)
class Program:
    """A traced loss.

    Args:
        equations: in order.
        parameters: the variables of the leaves of the parameters, by place.
        inputs: the variables of the leaves of the batch.
        constants: the values of variables that are neither: arrays that the function refers to.
        loss: what it returns, a variable or a literal.
        paths: of the parameters, by place.
    """

    equations: Sequence[Any]
    parameters: Sequence[Any]
    inputs: Sequence[Any]
    constants: dict[Any, Any]
    loss: Any
    paths: Sequence[str]


def traced(function: Callable[[list[Any], list[Any]], Any], leaves: Mapping[str, Any], batch: Sequence[Any]) -> Program:
    """Return the program of a function, in which the functions that it calls by `jax.jit` are in their place.

    Args:
        function: takes the leaves of the parameters and those of the batch; returns a scalar.
        leaves: types of the leaves (`jax.ShapeDtypeStruct`), by path.
        batch: arrays and numbers; only their types are used.

    Raises:
        UsageError: the function has effects, such as operations of unidist.
    """
    types = list(leaves.values())
    outer = jax.make_jaxpr(function)(types, list(batch))
    if outer.effects:
        raise UsageError(
            f"pipeline: the loss has effects besides its result ({', '.join(sorted(map(str, outer.effects)))}): "
            "exchanges between ranks, callbacks or prints, which each stage would do at another time. Take them out of "
            "loss_fn"
        )
    flat = jax.make_jaxpr(lambda *arguments: _inlined(outer.jaxpr, outer.consts, arguments))(*types, *batch)
    jaxpr = flat.jaxpr
    return Program(
        jaxpr.eqns,
        jaxpr.invars[: len(types)],
        jaxpr.invars[len(types) :],
        dict(zip(jaxpr.constvars, flat.consts, strict=True)),
        jaxpr.outvars[0],
        list(leaves),
    )


def evaluate(equations: Iterable[Any], values: dict[Any, Any], *, inline: bool = False) -> None:
    """Evaluate equations, from values by variable, to which their results are added."""
    for equation in equations:
        operands = [_read(variable, values) for variable in equation.invars]
        if inline and equation.primitive.name in _CALLS and "jaxpr" in equation.params:
            inner = equation.params["jaxpr"]
            results = _inlined(inner.jaxpr, inner.consts, operands)
        else:
            parameters = equation.primitive.get_bind_params(equation.params)
            with equation.ctx.manager:
                found = equation.primitive.bind(*operands, **parameters)
            results = found if equation.primitive.multiple_results else [found]
        values.update(zip(equation.outvars, results, strict=True))


def variables(operands: Iterable[Any]) -> list[Any]:
    """Return the operands that are no literals."""
    return [operand for operand in operands if not isinstance(operand, core.Literal)]


def _inlined(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))
    evaluate(jaxpr.eqns, values, inline=True)
    return [_read(variable, values) for variable in jaxpr.outvars]


def _read(variable: Any, values: dict[Any, Any]) -> Any:
    return variable.val if isinstance(variable, core.Literal) else values[variable]
