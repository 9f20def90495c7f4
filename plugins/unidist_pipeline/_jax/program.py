"""The loss function of a script as a list of equations (a jaxpr of JAX)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from unidist.errors import UsageError
from unidist_jax.models import inlined


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
    flat = jax.make_jaxpr(lambda *arguments: inlined(outer.jaxpr, outer.consts, arguments))(*types, *batch)
    jaxpr = flat.jaxpr
    return Program(
        jaxpr.eqns,
        jaxpr.invars[: len(types)],
        jaxpr.invars[len(types) :],
        dict(zip(jaxpr.constvars, flat.consts, strict=True)),
        jaxpr.outvars[0],
        list(leaves),
    )
