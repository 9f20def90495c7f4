"""Horovod's binding of TensorFlow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp
from unidist.errors import UsageError
from unidist.horovod_imports import real_horovod
from unidist_horovod.bindings.carriers import array_of
from unidist_horovod.bindings.common import CommonBinding, reductions
from unidist_horovod.bindings.graphs import GraphCache, OperationGraph, node_name
from unidist_horovod.bindings.interface import OperationFailed, Pending
from unidist_horovod.bindings.waiters import Waiters

with real_horovod():
    from horovod.tensorflow import mpi_ops

Array = npt.NDArray[Any]

_OPS = reductions(mpi_ops)
_PAUSE_SEC = 5e-4
_lib: Any = mpi_ops.MPI_LIB


class _TensorFlowPending(Pending):
    """An operation that a thread waits for.

    Args:
        inputs: what it reads.
        target: where its first output goes, multiplied by `factor`; None: nowhere else.
        factor: what Horovod has not multiplied by.
    """

    def __init__(self, inputs: Sequence[Array], target: Array | None, factor: float = 1.0) -> None:
        self._inputs = inputs
        self._target = target
        self._factor = factor
        self._outputs: list[Array] = []
        self._error: OperationFailed | None = None
        self._is_done = False
        self._running = threading.Lock()
        self._running.acquire()

    def complete(self, graph: OperationGraph) -> None:
        """Run the operation, however long it takes, and note the outcome. Does not raise."""
        try:
            self._outputs = graph.run(*self._inputs)
            self._deliver(self._outputs[0])
        except OperationFailed as exc:
            self._error = exc
        except Exception as exc:
            self._error = OperationFailed(f"{type(exc).__name__}: {exc}")
        self._inputs = ()
        self._target = None

    def ended(self) -> None:
        """Wake the thread that waits."""
        self._is_done = True
        self._running.release()

    def _deliver(self, output: Array) -> None:
        target = self._target
        if target is None:
            return
        if output.size != target.size:
            raise OperationFailed(f"Mismatched sizes: {output.size} elements came, {target.size} were expected")
        if self._factor != 1.0:
            np.multiply(output.reshape(-1), self._factor, out=target)
        elif output.size and output.ctypes.data != target.ctypes.data:  # a broadcast's root gets its own memory
            np.copyto(target, output.reshape(-1))

    def done(self) -> bool:
        return self._is_done

    def pause(self) -> None:
        if self._running.acquire(timeout=_PAUSE_SEC):  # gives the interpreter's lock to the thread that completes it
            self._running.release()

    def finish(self) -> None:
        if self._error is not None:
            raise self._error

    @property
    def output(self) -> Buffer:
        array = self._outputs[0]
        return Buffer(array.ctypes.data if array.size else 0, array.size, DType(array.dtype.name), array)

    @property
    def received(self) -> tuple[int, ...]:
        return tuple(self._outputs[1].tolist())


class TensorFlowBinding(CommonBinding):
    """The operations of `horovod.tensorflow` on memory; each one under way has a thread that waits for it.

    An operation's result is copied once, from memory of TensorFlow's to the target. Horovod takes factors in single
    precision here; what is missing in double precision is multiplied afterwards.
    """

    mpi_ops = mpi_ops
    num_names = 64

    def __init__(self) -> None:
        self._graphs = GraphCache()
        self._waiters = Waiters("unidist-horovod-wait")

    @override
    def release(self) -> None:
        self._waiters.stop()
        self._graphs.clear()

    @override
    def allreduce(
        self,
        source: Buffer,
        target: Buffer,
        *,
        shape: Sequence[int],
        op: ReduceOp,
        scale: float,
        name: str,
        members: int,
    ) -> Pending:
        factor, rest = _factors(scale, source.dtype)
        options = {"reduce_op": _OPS[op], "prescale_factor": 1.0, "postscale_factor": factor}
        pending = _TensorFlowPending([array_of(source).reshape(shape)], array_of(target), rest)
        return self._submit(_lib.horovod_allreduce, pending, name, members, options)

    @override
    def allgather(
        self, source: Buffer, target: Buffer | None, *, shape: Sequence[int], name: str, members: int
    ) -> Pending:
        pending = _TensorFlowPending([array_of(source).reshape(shape)], None if target is None else array_of(target))
        return self._submit(_lib.horovod_allgather, pending, name, members)

    @override
    def broadcast(self, buffer: Buffer, *, shape: Sequence[int], root: int, name: str, members: int) -> Pending:
        values = array_of(buffer)
        pending = _TensorFlowPending([values.reshape(shape)], values)
        return self._submit(_lib.horovod_broadcast, pending, name, members, {"root_rank": root})

    @override
    def alltoall(
        self,
        source: Buffer,
        target: Buffer | None,
        *,
        shape: Sequence[int],
        splits: Sequence[int],
        name: str,
        members: int,
    ) -> Pending:
        inputs = [array_of(source).reshape(shape), np.array(splits, np.int32)]
        pending = _TensorFlowPending(inputs, None if target is None else array_of(target))
        return self._submit(_lib.horovod_alltoall, pending, name, members)

    @override
    def reducescatter(
        self, source: Buffer, target: Buffer, *, shape: Sequence[int], scale: float, name: str, members: int
    ) -> Pending:
        factor, rest = _factors(scale, source.dtype)
        options = {"reduce_op": _OPS[ReduceOp.SUM], "prescale_factor": 1.0, "postscale_factor": factor}
        pending = _TensorFlowPending([array_of(source).reshape(shape)], array_of(target), rest)
        return self._submit(_lib.horovod_reducescatter, pending, name, members, options)

    @override
    def join(self) -> Pending:
        pending = _TensorFlowPending([], None)
        self._run(pending, self._graphs.take(("join",), _lib.horovod_join, []))
        return pending

    def _submit(
        self,
        operation: Callable[..., Any],
        pending: _TensorFlowPending,
        name: str,
        members: int,
        options: dict[str, Any] | None = None,
    ) -> Pending:
        every = {"name": node_name(name), "process_set_id": members, **(options or {})}
        dtypes = [array.dtype for array in pending._inputs]
        key = (operation.__name__, *dtypes, *every.values())
        self._run(pending, self._graphs.take(key, lambda *tensors: operation(*tensors, **every), dtypes))
        return pending

    def _run(self, pending: _TensorFlowPending, graph: OperationGraph) -> None:
        def job() -> None:
            pending.complete(graph)
            self._graphs.give_back(graph)  # before the name may be used again
            pending.ended()

        try:
            self._waiters.run(job)
        except UsageError:
            self._graphs.give_back(graph)
            raise


def _factors(scale: float, dtype: DType) -> tuple[float, float]:
    """Return the factor for Horovod, which compares it between ranks and takes float32, and the remaining factor."""
    factor = float(np.float32(scale))
    if scale and not np.finfo(np.float32).tiny <= abs(factor) <= np.finfo(np.float32).max:
        return 1.0, scale
    return factor, scale / factor if dtype is DType.FLOAT64 and scale else 1.0
