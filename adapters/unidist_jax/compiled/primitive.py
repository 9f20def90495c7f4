"""The primitive of JAX: its types, its batching, and its lowering to a call of the handler in C.

Two effects. The ordered one is JAX's own mechanism: tokens lead from one call to the next, through loops and branches
and from one program to the next. It costs each call of such a program JAX's slow path, so only what needs it has it.
The other one keeps JAX from dropping an operation whose results nobody uses, and is taken off when a whole program is
lowered (`_keep`): then XLA's `has_side_effect` does the same, and JAX calls the program on its fast path.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as jax_core
from jax._src import effects as jax_effects  # there is no public way to declare an effect
from jax._src.interpreters import partial_eval
from jax.extend import core
from jax.interpreters import batching, mlir

from unidist.buffer import Buffer, DType
from unidist.errors import UsageError
from unidist_arrays.memory import NUMPY_DTYPES, Array, array_of_buffer
from unidist_jax import _handler
from unidist_jax.compiled.failures import remember_failure
from unidist_jax.compiled.host_operation import HostOperation, ShapeDtype
from unidist_jax.memory import array_of, dtype_of, jax_array

_TARGET = "unidist_host_call"


class _Communicates(jax_effects.Effect):
    """An operation that runs though nobody may use its results."""

    def __str__(self) -> str:
        return "unidist"


class _CommunicatesInOrder(jax_effects.Effect):
    """An operation that runs in the order of the program."""

    def __str__(self) -> str:
        return "unidist in order"


_COMMUNICATES, _IN_ORDER = _Communicates(), _CommunicatesInOrder()
for _effect in (_Communicates, _CommunicatesInOrder):
    for _allowed in (
        jax_effects.lowerable_effects,
        jax_effects.control_flow_allowed_effects,
        jax_effects.custom_derivatives_allowed_effects,
        jax_effects.remat_allowed_effects,
    ):
        _allowed.add_type(_effect)
jax_effects.ordered_effects.add_type(_CommunicatesInOrder)


def bind(operation: HostOperation, operands: Sequence[Any]) -> list[Any]:
    """Call an operation on arrays or tracers; returns its results. Runs at once where nothing is traced."""
    results: list[Any] = _call_p.bind(*operands, operation=operation)
    return results


def is_tracing() -> bool:
    """Return whether JAX is tracing a function on this thread, so that operations are added to a program."""
    return not jax_core.trace_state_clean()


def flush() -> None:
    """Return when the programs that this thread has called so far have ended."""
    jax.effects_barrier()
    (jax.device_put(np.zeros(())) + 0).block_until_ready()


_call_p = core.Primitive("unidist")
_call_p.multiple_results = True


@_call_p.def_impl
def _run_at_once(*operands: Any, operation: HostOperation) -> list[jax.Array]:
    arrays = [array_of(operand) for operand in operands]
    results = [_empty(each) for each in operation.results([ShapeDtype(a.shape, a.dtype) for a in arrays])]
    operation.run(arrays, results)
    return [jax_array(result) for result in results]


@_call_p.def_effectful_abstract_eval
def _types(*operands: Any, operation: HostOperation) -> Any:
    found = operation.results([ShapeDtype(tuple(each.shape), np.dtype(each.dtype)) for each in operands])
    avals = [jax.core.ShapedArray(each.shape, each.dtype) for each in found]
    return avals, {_IN_ORDER if operation.ordered else _COMMUNICATES}


def _batch(operands: Sequence[Any], dims: Sequence[int | None], *, operation: HostOperation) -> Any:
    if not operation.can_be_batched:
        raise UsageError(f"{operation.title} cannot be used within jax.vmap: call it outside of the mapped function")
    place = operation.batched_at
    if place is None:
        return bind(operation, operands), list(dims)
    size = next(operand.shape[dim] for operand, dim in zip(operands, dims, strict=True) if dim is not None)
    moved = [
        batching.bdim_at_front(operand, dim, size) if place == 0 else _moved(operand, dim, size, place)
        for operand, dim in zip(operands, dims, strict=True)
    ]
    results = bind(operation, moved)
    return results, [place] * len(results)


def _moved(operand: Any, dim: int | None, size: int, place: int) -> Any:
    if dim is None:
        return jax.numpy.broadcast_to(jax.numpy.expand_dims(operand, place), _with(operand.shape, place, size))
    return jax.numpy.moveaxis(operand, dim, place)


def _with(shape: Sequence[int], place: int, size: int) -> tuple[int, ...]:
    return (*shape[:place], size, *shape[place:])


batching.primitive_batchers[_call_p] = _batch


def _keep(used: list[bool], eqn: Any) -> tuple[list[bool], Any]:
    """Keep an operation whoever uses its results, and take the effect off that has kept it so far."""
    del used
    if _COMMUNICATES in eqn.effects:
        eqn = eqn.replace(effects=frozenset(eqn.effects) - {_COMMUNICATES})
    return [True] * len(eqn.invars), eqn


partial_eval.dce_rules[_call_p] = _keep


class _Call:
    """One call in a lowered program: knows the types that belong to the addresses.

    Args:
        operation: what is called.
        operands: their types.
        results: their types.
    """

    def __init__(self, operation: HostOperation, operands: Sequence[ShapeDtype], results: Sequence[ShapeDtype]) -> None:
        self._operation = operation
        types = [(each, dtype_of(each), int(np.prod(each.shape))) for each in (*operands, *results)]
        self._types = [(count, dtype, each.shape) for each, dtype, count in types]
        self._num_operands = len(operands)
        self._first = 1 if operation.ordered else 0  # addresses before it are those of tokens

    def run(self, addresses: Sequence[int]) -> str | None:
        """Run the operation on the memory at these addresses; returns the text of an error."""
        try:
            arrays = self._arrays(addresses)
            self._operation.run(arrays[: self._num_operands], arrays[self._num_operands :])
        except BaseException as exc:
            remember_failure(exc)
            return f"{type(exc).__name__}: {exc}"
        return None

    def _arrays(self, addresses: Sequence[int]) -> list[Array]:
        if self._first:
            addresses = [*addresses[1 : 1 + self._num_operands], *addresses[2 + self._num_operands :]]
        return [
            array_of_buffer(Buffer(address, count, dtype), shape)
            for address, (count, dtype, shape) in zip(addresses, self._types, strict=True)
        ]


_calls: dict[int, _Call] = {}
"""By number. They are kept for ever: JAX's fast path holds on to nothing but XLA's program, whose end nobody tells."""
_numbers = itertools.count(1)


def _run_call(number: int, addresses: tuple[int, ...]) -> str | None:
    call = _calls.get(number)
    if call is None:
        return f"UsageError: host call {number} is not of this process: it was compiled by another one"
    return call.run(addresses)


_handler.set_function(_run_call)
jax.ffi.register_ffi_target(_TARGET, _handler.handler(), platform="cpu")


def _lower(ctx: Any, *operands: Any, operation: HostOperation) -> Any:
    given = [ShapeDtype(tuple(each.shape), np.dtype(each.dtype)) for each in ctx.avals_in]
    made = [ShapeDtype(tuple(each.shape), np.dtype(each.dtype)) for each in ctx.avals_out]
    call = _Call(operation, given, made)
    number = next(_numbers)
    if not _calls:  # before Python, or the runtime, ends: after what `init` has registered, so it runs before that
        atexit.register(flush)
    _calls[number] = call
    aliases = _aliases(given, made)
    lower = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True, operand_output_aliases=aliases)
    if not operation.ordered:
        return lower(ctx, *operands, number=np.int64(number))
    token = jax.core.abstract_token
    tokened = ctx.replace(avals_in=(token, *ctx.avals_in), avals_out=(token, *ctx.avals_out))
    lower = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True)
    after, *results = lower(tokened, ctx.tokens_in.get(_IN_ORDER), *operands, number=np.int64(number))
    ctx.set_tokens_out(mlir.TokenSet({_IN_ORDER: after}))
    return results


def _aliases(operands: Sequence[ShapeDtype], results: Sequence[ShapeDtype]) -> dict[int, int]:
    """Return which result may have the memory of which operand: those of the same place and type."""
    return {place: place for place, (a, b) in enumerate(zip(operands, results, strict=False)) if a == b}


mlir.register_lowering(_call_p, _lower, platform="cpu")


def _empty(each: ShapeDtype) -> Array:
    from unidist_arrays.memory import empty_array

    return empty_array(each.shape, NUMPY_DTYPES[DType(np.dtype(each.dtype).name)])
