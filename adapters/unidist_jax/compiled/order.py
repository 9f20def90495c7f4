"""The order of the calls in a program: that in which they were traced, on every rank.

XLA's CPU runtime runs independent calls side by side on a few threads, in an order that depends on time. Calls that
wait for other ranks would block each other. So they have an *ordered effect* of JAX: tokens lead from one call to the
next, through loops, branches and inner functions, and no call is dropped, merged or moved out of a loop.

Programs that one thread calls run one after the other anyway, so no token needs to lead from one program to the next.
JAX would carry it all the same, and call each such program on its slow path, which takes 0.1 ms. So some functions
of JAX are replaced:

- Before JAX lowers a whole program, the program is wrapped into one equation without effects, whose lowering makes the
  first token.
- `scan` under `grad` moves what does not change from one iteration to the next out of the loop, with or without
  effects. It does not for loops with calls: each iteration receives its own message. Within `jax.checkpoint` that is
  another function, in which loops with messages are refused.

Relies on these private parts of JAX, where there is no public way to declare an effect:

- `effects.*_effects`, the sets of types of effects that each transformation accepts;
- `interpreters.pxla._dce_jaxpr`, which prunes a whole program before it is lowered. Its result is kept by identity, so
  the replacement has the same cache (`util.weakref_lru_cache`);
- `lax.control_flow.loops._scan_known_hoisting(program, constants, num_residuals)`, which from 0.11 on has a fourth
  argument, the number of residuals that each iteration computes again;
- `lib.jax_mlir_ext.inlined_func_call`, with which JAX inlines the functions of a program itself;
- `interpreters.partial_eval`: `partial_eval_jaxpr_custom_rules`, and `convert_constvars_jaxpr`, public from 0.11 on.

Until 0.10 a program with constants is a `ClosedJaxpr`, a wrapper around one without; from 0.11 on both are
`Jaxpr`, which keeps the accessors `jaxpr` and `consts` and `replace(jaxpr=..., consts=...)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import effects as jax_effects
from jax._src.interpreters import partial_eval, pxla
from jax._src.lax.control_flow import loops
from jax._src.lib import jax_mlir_ext
from jax._src.util import weakref_lru_cache
from jax.extend import core
from jax.extend.mlir import ir
from jax.interpreters import mlir

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
    results = mlir.core_call_lowering(inner, *operands, name="unidist_program", call_jaxpr=program)
    functions = {each.operation.attributes["sym_name"].value: each for each in ctx.module_context.module.body}
    _inline_calls_with_tokens_alone(functions["unidist_program"].operation, functions)
    return results


def _inline_calls_with_tokens_alone(operation: ir.Operation, functions: Mapping[str, Any]) -> None:
    """Put functions that take nothing but tokens in the place of their calls within an operation.

    XLA of jaxlib 0.11 does it too, in a way that makes it end the process (hlo_cse.cc) if the function has a constant
    twice.
    """
    for inner in [each for region in operation.regions for block in region for each in block]:
        _inline_calls_with_tokens_alone(inner.operation, functions)
        if inner.operation.name != "func.call":
            continue
        called = functions[inner.operation.attributes["callee"].value].operation
        _inline_calls_with_tokens_alone(called, functions)
        operands = list(inner.operation.operands)
        if operands and all(str(each.type) == "!stablehlo.token" for each in operands):
            with ir.InsertionPoint(inner):
                results = jax_mlir_ext.inlined_func_call(called, operands)
            for old, new in zip(inner.operation.results, results, strict=True):
                old.replace_all_uses_with(new)
            inner.operation.erase()


mlir.register_lowering(_program_p, _lower_program)


def _in_one_equation(program: Any) -> Any:
    """Return a program that is one equation without effects: it calls the given one."""
    jaxpr = program.jaxpr
    inner = partial_eval.convert_constvars_jaxpr(jaxpr)
    new_variable = core.gensym()
    results = [new_variable(variable.aval) for variable in jaxpr.outvars]
    operands = [*jaxpr.constvars, *jaxpr.invars]
    if not operands:  # then the call has one that is not used: see `_inline_calls_with_tokens_alone`
        operands = [core.Literal(np.int32(0), jax.core.ShapedArray((), np.int32))]
        inner = inner.replace(invars=[new_variable(operands[0].aval)])
    equation = core.new_jaxpr_eqn(operands, results, _program_p, {"program": inner}, core.no_effects)
    outer = jaxpr.replace(outvars=results, eqns=[equation], effects=set())
    return program.replace(jaxpr=outer, consts=program.consts)


def _wrap_whole_programs() -> None:
    prune = pxla._dce_jaxpr

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

    def keep_calls(program: Any, constants: Any, num_residuals: int, *others: int) -> Any:
        if COMMUNICATES in program.effects:
            return program, constants, [False] * num_residuals, []
        return move_out(program, constants, num_residuals, *others)

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
    for inner in core.subjaxprs(jaxpr):
        yield from _messages(inner)


_wrap_whole_programs()
_keep_calls_in_loops()
