"""The order of the calls in a program: that in which they were traced, on every rank.

XLA's CPU runtime runs independent calls side by side on a few threads, in an order that depends on time. Calls that
wait for other ranks would block each other. So they have an *ordered effect* of JAX: tokens lead from one call to the
next, through loops, branches and inner functions, and no call is dropped, merged or moved out of a loop.

Programs that one thread calls run one after the other anyway, so no token needs to lead from one program to the next.
JAX would carry it all the same, and call each such program on its slow path, which takes 0.1 ms. So some functions
of JAX are replaced:

- Before JAX lowers a whole program, the program is wrapped into one equation without effects, whose lowering makes the
  first token. A JAX where that function has another name calls these programs on its slow path; nothing else changes.
- `scan` under `grad` moves what does not change from one iteration to the next out of the loop, with or without
  effects. It does not for loops with calls: each iteration receives its own message. Within `jax.checkpoint` that is
  another function, in which loops with messages are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax._src import core as jax_core
from jax._src import effects as jax_effects  # there is no public way to declare an effect
from jax._src.interpreters import mlir, partial_eval, pxla
from jax._src.lax.control_flow import loops
from jax._src.util import weakref_lru_cache
from jax.extend import core

from unidist.errors import UsageError
from unidist_jax.compiled.host_operation import HostOperation


class _Communicates(jax_effects.Effect):
    """A call that runs in its place in the program, also if nobody uses its results."""

    def __str__(self) -> str:
        return "unidist"


COMMUNICATES = _Communicates()

for _allowed in (
    jax_effects.ordered_effects,
    jax_effects.shardable_ordered_effects,
    jax_effects.lowerable_effects,
    jax_effects.control_flow_allowed_effects,
    jax_effects.custom_derivatives_allowed_effects,
    jax_effects.remat_allowed_effects,
    jax_effects.partial_eval_kept_effects,
):
    _allowed.add_type(_Communicates)

_program_p = core.Primitive("unidist_program")
_program_p.multiple_results = True


def _lower_program(ctx: Any, *operands: Any, program: Any) -> Any:
    inner = ctx.replace(tokens_in=mlir.TokenSet.create([COMMUNICATES]))
    return mlir.core_call_lowering(inner, *operands, name="unidist_program", call_jaxpr=program)


mlir.register_lowering(_program_p, _lower_program)


def _in_one_equation(program: Any) -> Any:
    """Return a program that is one equation without effects: it calls the given one."""
    jaxpr = program.jaxpr
    inner = jax_core.ClosedJaxpr(partial_eval.convert_constvars_jaxpr(jaxpr), ())
    new_variable = jax_core.gensym()
    results = [new_variable(variable.aval) for variable in jaxpr.outvars]
    operands = [*jaxpr.constvars, *jaxpr.invars]
    equation = jax_core.new_jaxpr_eqn(operands, results, _program_p, {"program": inner}, jax_core.no_effects)
    return jax_core.ClosedJaxpr(jaxpr.replace(outvars=results, eqns=[equation], effects=set()), program.consts)


def _wrap_whole_programs() -> None:
    prune = getattr(pxla, "_dce_jaxpr", None)
    if prune is None:
        return

    @weakref_lru_cache  # as the original: JAX keeps what it has compiled by the identity of what this returns
    def prune_and_wrap(program: Any, *options: Any) -> Any:
        pruned, *others = prune(program, *options)
        if pruned.effects == {COMMUNICATES}:
            pruned = _in_one_equation(pruned)
        return (pruned, *others)

    pxla._dce_jaxpr = prune_and_wrap


def _keep_calls_in_loops() -> None:
    move_out = loops._scan_known_hoisting
    split = partial_eval.partial_eval_jaxpr_custom_rules[loops.scan_p]

    def keep_calls(program: Any, constants: Any, num_residuals: int) -> Any:
        if COMMUNICATES in program.effects:
            return program, constants, [False] * num_residuals, []
        return move_out(program, constants, num_residuals)

    def refuse_messages(saveable: Any, unknown: Any, instantiated: Any, equation: Any) -> Any:
        for operation in _messages(equation.params["jaxpr"].jaxpr):
            raise UsageError(
                f"{operation.title} is in a loop (scan, fori_loop) within jax.checkpoint, where JAX would call it once "
                "for all iterations: apply jax.checkpoint to the body of the loop instead"
            )
        return split(saveable, unknown, instantiated, equation)

    loops._scan_known_hoisting = keep_calls
    partial_eval.partial_eval_jaxpr_custom_rules[loops.scan_p] = refuse_messages


def _messages(jaxpr: Any) -> Iterator[HostOperation]:
    """Yield the operations of a program that ranks match by their order."""
    if COMMUNICATES not in jaxpr.effects:
        return
    for equation in jaxpr.eqns:
        operation = equation.params.get("operation")
        if isinstance(operation, HostOperation) and operation.matched_by_order:
            yield operation
    for inner in jax_core.subjaxprs(jaxpr):
        yield from _messages(inner)


_wrap_whole_programs()
_keep_calls_in_loops()
