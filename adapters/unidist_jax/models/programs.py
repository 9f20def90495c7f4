"""Programs of JAX (jaxprs), for strategies that compute a traced loss in another way, equation by equation.

Relies on the form of jaxprs, which JAX does not promise to keep, and on `jax.extend` (`core.Literal`,
`source_info_util`), in 0.10 and later:

- a program has `constvars`, `invars`, `eqns` and `outvars`. Programs within equations have their constants, or are
  without (`called`): until 0.10 these are two classes, from 0.11 on one;
- an equation has `primitive`, `params`, `invars`, `outvars`, `effects`, `ctx.manager` and `source_info`;
- `scan` has the numbers of its constants and of what it carries in `num_consts` and `num_carry`, from 0.11 on in a tree
  of three groups, `ft_in` (`scan_counts`).

The names of operations and of their other parameters are in the rules of the strategies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from jax.extend import core, source_info_util

CALLS = ("jit", "pjit", "closed_call", "core_call")
"""The operations that call a function; see `inlined`."""


def is_literal(atom: Any) -> bool:
    """Return whether an operand or a result is a number in the program, and not a variable."""
    return isinstance(atom, core.Literal)


def value_of(atom: Any, values: dict[Any, Any]) -> Any:
    """Return the value of a literal, or of a variable, by which it is found."""
    return atom.val if is_literal(atom) else values[atom]


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Return those that are no literals."""
    return [atom for atom in atoms if not is_literal(atom)]


def called(program: Any) -> tuple[Any, Sequence[Any]]:
    """Return a program that is a parameter of an equation, and its constants; none if it is without."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def scan_counts(equation: Any) -> tuple[int, int]:
    """Return how many operands of a `scan` are constants, and how many it carries to the next iteration."""
    parameters = equation.params
    if "ft_in" not in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    constants, carried, _ = parameters["ft_in"].unpack()
    return len(constants), len(carried)


def line_of(equation: Any) -> str:
    """Return the line of the script that an equation comes from."""
    return source_info_util.summarize(equation.source_info)


def at_line_of(equation: Any) -> AbstractContextManager[None]:
    """Return a context in which what is traced has the line of an equation."""
    context: AbstractContextManager[None] = source_info_util.user_context(equation.source_info.traceback)
    return context


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
            results = inlined(*called(equation.params["jaxpr"]), operands)
        else:
            results = bind_equation(equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
    return [value_of(atom, values) for atom in jaxpr.outvars]
