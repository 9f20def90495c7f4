"""Rules of operations with programs inside: inner functions, loops, checkpoints and functions with a gradient rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unidist_jax.models import CALLS, called, scan_counts
from unidist_tensor_parallel._jax.propagation import CutValue, NeedsExchange, Propagation, Rules
from unidist_tensor_parallel._jax.rules import RULES
from unidist_tensor_parallel.layout.cuts import Cut


def _inlined(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    """Functions that are called: with their program in place of the call."""
    program = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
    return run.run(*called(program), values)


def _checkpointed(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    """`jax.checkpoint`: the program that is computed again in the backward pass is that of the parts."""
    kept: list[list[CutValue]] = []

    def parts(*arrays: Any) -> list[Any]:
        operands = [value._replace(array=array) for value, array in zip(values, arrays, strict=True)]
        kept.append(run.run(*called(equation.params["jaxpr"]), operands))
        return [value.array for value in kept[-1]]

    options = {name: equation.params[name] for name in ("prevent_cse", "policy")}
    arrays = jax.checkpoint(parts, **options)(*(value.array for value in values))
    return [value._replace(array=array) for value, array in zip(kept[-1], arrays, strict=True)]


def _scanned(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    """`scan`: what is carried from one iteration to the next is whole, stacked arrays may be cut within a row."""
    parameters = equation.params
    num_constants, num_carried = scan_counts(equation)
    constants = values[:num_constants]
    carried_first = values[num_constants : num_constants + num_carried]
    first = [run.whole(value)._replace(is_constant=False) for value in carried_first]  # later ones may not be
    stacked = [run.whole(each) if _cuts_rows(each) else each for each in values[num_constants + num_carried :]]
    cuts: list[Cut | None] = []

    def body(carried: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        operands = [
            *constants,
            *(value._replace(array=array) for value, array in zip(first, carried, strict=True)),
            *(_row(value, array) for value, array in zip(stacked, rows, strict=True)),
        ]
        results = run.run(*called(parameters["jaxpr"]), operands)
        cuts[:] = [value.cut for value in results[num_carried:]]
        after = [run.whole(value).array for value in results[:num_carried]]
        return after, [value.array for value in results[num_carried:]]

    options = {name: parameters[name] for name in ("length", "reverse", "unroll")}
    last, rows = jax.lax.scan(body, [each.array for each in first], [each.array for each in stacked], **options)
    shapes = [tuple(variable.aval.shape) for variable in equation.outvars]
    results = [CutValue(array, None, shape) for array, shape in zip(last, shapes, strict=False)]
    for array, cut, shape in zip(rows, cuts, shapes[num_carried:], strict=True):
        results.append(CutValue(array, None if cut is None else cut.along(cut.dim + 1), shape))
    return results


def _cuts_rows(value: CutValue) -> bool:
    return value.cut is not None and value.cut.dim == 0


def _row(value: CutValue, array: Any) -> CutValue:
    cut = None if value.cut is None else value.cut.along(value.cut.dim - 1)
    return CutValue(array, cut, value.shape[1:], value.is_constant)


def _with_gradient_rule(run: Propagation, equation: Any, values: Sequence[CutValue]) -> list[CutValue] | None:
    """`jax.custom_jvp`: as a function of the parts with the same rule, if neither it nor the rule needs exchanges."""
    program, its_constants = called(equation.params["call_jaxpr"])
    cut = next(value.cut for value in values if value.cut is not None)
    if any(value.cut != cut and value.shape for value in values):
        return None
    traced: list[list[CutValue]] = []

    def given(arrays: Sequence[Any], like: Sequence[CutValue]) -> list[CutValue]:
        return [value._replace(array=array) for value, array in zip(like, arrays, strict=True)]

    @jax.custom_jvp
    def parts(*arrays: Any) -> list[Any]:
        with run.without_exchanges():
            traced.append(run.run(program, its_constants, given(arrays, values)))
        return [value.array for value in traced[-1]]

    @parts.defjvp
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        num_constants = equation.params["num_consts"]  # of the function, which its rule has itself
        own, primals, tangents = values[num_constants:], primals[num_constants:], tangents[num_constants:]
        absent = [not jnp.issubdtype(jnp.result_type(array), jnp.inexact) for array in primals]
        found, constants, zeros = equation.params["jvp_jaxpr_fun"].call_wrapped(*absent)
        present = [place for place, none in enumerate(absent) if not none]
        operands = [*given(primals, own), *given([tangents[i] for i in present], [own[i] for i in present])]
        with run.without_exchanges():
            results = run.run(found, constants, operands)
        traced.append(results[: len(zeros)])
        after, made = [value.array for value in traced[-1]], iter(value.array for value in results[len(zeros) :])
        changes = [_no_change(array) if none else next(made) for array, none in zip(after, zeros, strict=True)]
        return after, changes

    arrays = [value.array for value in values]
    try:
        if run.may_exchange:  # else this call is inside such a rule, which may call its own function
            jax.eval_shape(lambda *given: jax.jvp(parts, given, jax.tree.map(_no_change, given)), *arrays)
        results = parts(*arrays)
    except NeedsExchange:
        if not run.may_exchange:
            raise
        return None
    return [value._replace(array=array) for value, array in zip(traced[-1], results, strict=True)]


def _no_change(array: Any) -> Any:
    """Return the zero tangent of an array."""
    if jnp.issubdtype(jnp.result_type(array), jnp.inexact):
        return jnp.zeros_like(array)
    return np.zeros(jnp.shape(array), jax.dtypes.float0)


ALL_RULES: Rules = {
    **RULES,
    **dict.fromkeys(CALLS, _inlined),
    **dict.fromkeys(("checkpoint", "remat2", "remat"), _checkpointed),
    "scan": _scanned,
    "custom_jvp_call": _with_gradient_rule,
}
"""Every rule, by the name of the operation."""
