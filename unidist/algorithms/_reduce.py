"""Element-wise reduction of two buffers in host memory; the only arithmetic of the algorithms.

The C kernels do it where they were built, numpy elsewhere. Both are imported when first used: the
launcher reads the names of the algorithms without either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from unidist.algorithms._checks import check_order
from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import ReduceOp
from unidist.errors import ConfigurationError, UsageError


class Kernel(Protocol):
    """Computes `target = scale * (target op source)`; without a source, `target = scale * target`."""

    def __call__(self, target: Buffer, source: Buffer | None, op: ReduceOp, scale: float) -> None:
        """Equal counts and dtypes; no partial overlap.

        16-bit floats are computed in float32 and rounded to nearest even. On integers the product with
        `scale` is computed in float64 and truncated toward zero, where 1/n is taken as a division by n; a
        bool stays what it is unless `scale` is 0.
        """


def check_reduction(buffer: Buffer, op: ReduceOp) -> None:
    """Raise UsageError where `op` has no meaning for the dtype, or the memory is not the host's."""
    check_order(buffer.dtype, op)
    if buffer.memory != HOST:
        raise UsageError(
            "an all-reduce algorithm over send and recv adds up in host memory, "
            f"but the buffer is in {buffer.memory!r}. "
            "Leave out --allreduce-algorithm to use the engine's own, or copy the data to the host."
        )


def reduce_into(target: Buffer, source: Buffer, op: ReduceOp, scale: float = 1.0) -> None:
    """Set each element of `target` to `scale * (target op source)`, see `Kernel`."""
    if target.count:
        kernel()(target, source, op, scale)


def scale_in_place(target: Buffer, scale: float) -> None:
    """Multiply each element of `target` by `scale`, see `Kernel`."""
    if scale != 1.0 and target.count:
        kernel()(target, None, ReduceOp.SUM, scale)


@functools.cache
def kernel() -> Kernel:
    """Return the arithmetic to use in this process: compiled, or numpy's.

    Raises:
        ConfigurationError: neither is there.
    """
    return _compiled_kernel() or _numpy_kernel()


class CompiledKernel(NamedTuple):
    """The compiled arithmetic, with its codes.

    Args:
        reduce: `reduce(target, sources, count, dtype, op, scale)` sets each element at the address `target` to `scale`
            times the reduction of those at all addresses `sources`, a tuple, in their order. 16-bit floats are rounded
            once, at the end. `dtype` and `op` are codes.
        dtypes: the code of each type.
        ops: the code of each reduction.
    """

    reduce: Callable[[int, tuple[int, ...], int, int, int, float], None]
    dtypes: Mapping[DType, int]
    ops: Mapping[ReduceOp, int]


@functools.cache
def compiled_kernel() -> CompiledKernel | None:
    """Return the compiled arithmetic; None: it was built without a C compiler."""
    try:
        from unidist.algorithms import _kernels
    except ImportError:
        return None
    return CompiledKernel(
        _kernels.reduce,
        {DType(name): code for code, name in enumerate(_kernels.DTYPES)},
        {ReduceOp(name): code for code, name in enumerate(_kernels.REDUCE_OPS)},
    )


def _compiled_kernel() -> Kernel | None:
    compiled = compiled_kernel()
    if compiled is None:
        return None
    plain, dtypes, ops = compiled

    def reduce(target: Buffer, source: Buffer | None, op: ReduceOp, scale: float) -> None:
        sources = (target.address,) if source is None else (target.address, source.address)
        plain(target.address, sources, target.count, dtypes[target.dtype], ops[op], scale)

    return reduce


def _numpy_kernel() -> Kernel:
    try:
        from unidist.algorithms._reduce_numpy import reduce
    except ImportError as exc:
        raise ConfigurationError(
            "the all-reduce algorithms need the C kernels or numpy to add up, and neither is installed. "
            "Run `pip install numpy`, or reinstall unidist-train with a C compiler."
        ) from exc
    return reduce
