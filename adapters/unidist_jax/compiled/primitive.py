"""The primitive of JAX: its types, its batching, and its lowering to a call of the handler in C.

The calls of a program run one at a time, in the order in which they were traced; see `order`.

Relies on what primitives of others may use (`jax.extend.core`, `jax.interpreters`), in 0.10 and later: the rules by
primitive, and the tokens of effects in the context of a lowering. One private part of JAX is among it:
`core.abstract_token`, which from 0.11 on is `jax.ffi.abstract_token`.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.core import abstract_token
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unidist.buffer import Buffer
from unidist.errors import UsageError
from unidist_arrays.memory import Array, array_of_buffer
from unidist_jax import _handler
from unidist_jax.compiled.devices import DeviceRendezvous, device_count, on_every_device
from unidist_jax.compiled.failures import remember_failure
from unidist_jax.compiled.host_operation import HostOperation, ShapeDtype
from unidist_jax.compiled.order import COMMUNICATES
from unidist_jax.memory import array_of, dtype_of, jax_array

_TARGET = "unidist_host_call"
_MOST_PREPARED = 16
"""XLA gives a program the same memory again and again, but not for ever."""


def bind(operation: HostOperation, operands: Sequence[Any]) -> list[Any]:
    """Call an operation on arrays or tracers; returns its results. Runs at once where nothing is traced."""
    results: list[Any] = _call_p.bind(*operands, operation=operation)
    return results


def flush() -> None:
    """Return when the programs that this thread has called so far have ended.

    XLA runs the programs that a thread calls one after the other: so when one that is called now has ended. Those that
    failed have ended, too; their errors come up where their results are used.
    """
    devices = jax.local_devices(backend="cpu")
    (jax.device_put(np.zeros(()), devices[0]) + 0).block_until_ready()
    if _call_of_several_devices:  # programs for several devices run one after the other, beside those for one
        mesh = Mesh(np.array(devices), ("devices",))
        numbers = jax.device_put(np.zeros(len(devices)), NamedSharding(mesh, PartitionSpec("devices")))
        (numbers + jnp.sum(numbers)).block_until_ready()


_call_p = core.Primitive("unidist")
_call_p.multiple_results = True


@_call_p.def_impl
def _run_at_once(*operands: Any, operation: HostOperation) -> list[jax.Array]:
    if operation.matched_by_order:
        flush()  # those of programs that were called come first
    results = operation.run_at_once([array_of(operand) for operand in operands])
    return [
        _placed(jax_array(result), operands[place] if place < len(operands) else None)
        for place, result in enumerate(results)
    ]


def _placed(result: jax.Array, operand: Any) -> jax.Array:
    """Return a result on the devices of the operand of the same place, if these are several and it has its shape."""
    sharding = getattr(operand, "sharding", None)
    if sharding is None or sharding.num_devices == 1 or operand.shape != result.shape:
        return result
    return jax.device_put(result, sharding)


@_call_p.def_effectful_abstract_eval
def _types(*operands: Any, operation: HostOperation) -> Any:
    found = operation.results([ShapeDtype(tuple(each.shape), np.dtype(each.dtype)) for each in operands])
    return [jax.core.ShapedArray(each.shape, each.dtype) for each in found], {COMMUNICATES}


def _batch(operands: Sequence[Any], dims: Sequence[int | None], *, operation: HostOperation) -> Any:
    if not operation.can_be_batched:
        raise UsageError(f"{operation.title} cannot be used within jax.vmap: call it outside of the mapped function")
    place = operation.batched_at
    if place is None:
        results = bind(operation, operands)
        return results, list(dims)[: len(results)]
    size = next(operand.shape[dim] for operand, dim in zip(operands, dims, strict=True) if dim is not None)
    moved = [_batched_at(place, operand, dim, size) for operand, dim in zip(operands, dims, strict=True)]
    results = bind(operation, moved)
    return results, [place] * len(results)


def _batched_at(place: int, operand: Any, dim: int | None, size: int) -> Any:
    """Return an operand whose dim `place` is that of the batch; a scalar becomes one row."""
    operand = batching.bdim_at_front(operand, dim, size)
    while operand.ndim <= place:
        operand = jnp.expand_dims(operand, 1)
    return jnp.moveaxis(operand, 0, place)


batching.primitive_batchers[_call_p] = _batch


def _refuse_gradients(operands: Sequence[Any], tangents: Sequence[Any], *, operation: HostOperation) -> Any:
    raise UsageError(
        f"{operation.title} has no gradient: give it jax.lax.stop_gradient(...) of what is differentiated, or wrap it "
        "into a function with jax.custom_vjp"
    )


ad.primitive_jvps[_call_p] = _refuse_gradients


class _Call:
    """One call in a lowered program: knows the types that belong to the addresses.

    Args:
        operation: what is called.
        operands: their types.
        results: their types.
        devices: number of devices of this process that run the program, on equal values.
    """

    def __init__(
        self, operation: HostOperation, operands: Sequence[ShapeDtype], results: Sequence[ShapeDtype], devices: int
    ) -> None:
        self._operation = operation
        self._meeting = None if devices == 1 else DeviceRendezvous(devices, operation.title, self._run_once)
        types = [(each, dtype_of(each), int(np.prod(each.shape))) for each in (*operands, *results)]
        self._types = [(count, dtype, each.shape) for each, dtype, count in types]
        self._num_operands = len(operands)
        self._prepared: dict[tuple[int, ...], Callable[[], None]] = {}

    def run(self, addresses: tuple[int, ...]) -> str | None:
        """Run the operation on the memory at these addresses; returns the text of an error."""
        try:
            if self._meeting is not None:
                return self._meeting.run(addresses)
            run = self._prepared.get(addresses)
            (run or self._prepare(addresses))()
        except BaseException as exc:
            return remember_failure(exc)
        return None

    def _run_once(self, calls: Sequence[tuple[int, ...]]) -> str | None:
        """Run the operation on the memory of one device, and give its results to the others."""
        try:
            chosen = min(calls)  # the same one each time, as far as XLA uses the same memory
            run = self._prepared.get(chosen)
            (run or self._prepare(chosen))()
            made = self._arrays(chosen)[self._num_operands :]
            for addresses in calls:
                for target, source in zip(self._arrays(addresses)[self._num_operands :], made, strict=True):
                    if addresses is not chosen:
                        np.copyto(target, source)
        except BaseException as exc:
            return remember_failure(exc)
        return None

    def _prepare(self, addresses: tuple[int, ...]) -> Callable[[], None]:
        arrays = self._arrays(addresses)
        if len(self._prepared) == _MOST_PREPARED:
            self._prepared.clear()
        prepared = self._operation.prepared(arrays[: self._num_operands], arrays[self._num_operands :])
        self._prepared[addresses] = prepared
        return prepared

    def _arrays(self, addresses: Sequence[int]) -> list[Array]:
        """Return the operands and the results; before each there is the address of a token."""
        addresses = [*addresses[1 : 1 + self._num_operands], *addresses[2 + self._num_operands :]]
        return [
            array_of_buffer(Buffer(address, count, dtype), shape)
            for address, (count, dtype, shape) in zip(addresses, self._types, strict=True)
        ]


_calls: dict[int, _Call] = {}
"""By number. They are kept for ever: JAX's fast path holds on to nothing but XLA's program, whose end nobody tells."""
_numbers = itertools.count(1)
_call_of_several_devices = False
"""Whether a program for several devices has calls."""


def _run_call(number: int, addresses: tuple[int, ...]) -> str | None:
    call = _calls.get(number)
    if call is None:
        return f"UsageError: host call {number} is not of this process: it was compiled by another one"
    return call.run(addresses)


_handler.set_function(_run_call)
jax.ffi.register_ffi_target(_TARGET, _handler.handler(), platform="cpu")


def _lower(ctx: Any, *operands: Any, operation: HostOperation) -> Any:
    global _call_of_several_devices
    devices = device_count(ctx, operation.title)
    _call_of_several_devices = _call_of_several_devices or devices > 1
    given = [ShapeDtype(tuple(each.shape), np.dtype(each.dtype)) for each in ctx.avals_in]
    made = [ShapeDtype(tuple(each.shape), np.dtype(each.dtype)) for each in ctx.avals_out]
    call = _Call(operation, given, made, devices)
    number = next(_numbers)
    if not _calls:  # before Python, or the runtime, ends: after what `init` has registered, so it runs before that
        atexit.register(flush)
    _calls[number] = call
    tokened = ctx.replace(avals_in=(abstract_token, *ctx.avals_in), avals_out=(abstract_token, *ctx.avals_out))
    lower = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True, operand_output_aliases=_aliases(given, made))

    def call_host(*values: Any) -> Any:
        return lower(tokened, *values, number=np.int64(number))

    inputs = (ctx.tokens_in.get(COMMUNICATES), *operands)
    after, *results = call_host(*inputs) if devices == 1 else on_every_device(tokened, devices, inputs, call_host)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({COMMUNICATES: after})))
    return results


def _aliases(operands: Sequence[ShapeDtype], results: Sequence[ShapeDtype]) -> dict[int, int]:
    """Return which result has the memory of which operand: those of the same place and type, behind the token."""
    places = enumerate(zip(operands, results, strict=False), start=1)
    return {place: place for place, (operand, result) in places if operand == result}


def _refuse(ctx: Any, *operands: Any, operation: HostOperation) -> Any:
    platforms = ", ".join(ctx.module_context.platforms)
    raise UsageError(
        f"{operation.title} is in a program for {platforms}; unidist's operations run in programs for the CPU only. "
        "Call it outside of the compiled function, or set JAX_PLATFORMS=cpu"
    )


mlir.register_lowering(_call_p, _refuse)
mlir.register_lowering(_call_p, _lower, platform="cpu")
