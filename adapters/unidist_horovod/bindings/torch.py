"""Horovod's binding of PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp
from unidist.horovod_imports import real_horovod
from unidist_horovod.bindings.common import CommonBinding, reductions
from unidist_horovod.bindings.interface import OperationFailed, Pending

with real_horovod():
    from horovod.torch import mpi_ops

_DTYPES = {
    DType.UINT8: (torch.uint8, "torch_ByteTensor"),
    DType.INT8: (torch.int8, "torch_CharTensor"),
    DType.INT16: (torch.int16, "torch_ShortTensor"),
    DType.INT32: (torch.int32, "torch_IntTensor"),
    DType.INT64: (torch.int64, "torch_LongTensor"),
    DType.FLOAT16: (torch.float16, "torch_HalfTensor"),
    DType.FLOAT32: (torch.float32, "torch_FloatTensor"),
    DType.FLOAT64: (torch.float64, "torch_DoubleTensor"),
}
_UNIDIST_DTYPES = {theirs: ours for ours, (theirs, _) in _DTYPES.items()}
_OPS = reductions(mpi_ops)
_lib: Any = mpi_ops.mpi_lib

# Horovod's threads must never hold the last reference to a tensor over foreign memory: to free it they need the
# interpreter's lock, and while Horovod stops they hold a lock that a Python thread may be waiting for with that one.
_in_use: dict[int, tuple[torch.Tensor, ...]] = {}


class _TorchPending(Pending):
    __slots__ = ("_handle", "_output", "_received")

    def __init__(self, handle: int, output: torch.Tensor, received: torch.Tensor | None = None) -> None:
        self._handle = handle
        self._output = output
        self._received = received

    def done(self) -> bool:
        return bool(_lib.horovod_torch_poll(self._handle))

    def finish(self) -> None:
        try:
            _lib.horovod_torch_wait_and_clear(self._handle)
        except RuntimeError as exc:
            raise OperationFailed(str(exc)) from None
        finally:
            _in_use.pop(self._handle, None)

    @property
    def output(self) -> Buffer:
        tensor = self._output
        address = tensor.data_ptr() if tensor.numel() else 0
        return Buffer(address, tensor.numel(), _UNIDIST_DTYPES[tensor.dtype], tensor)

    @property
    def received(self) -> tuple[int, ...]:
        assert self._received is not None, "all-to-all only"
        return tuple(self._received.tolist())


class TorchBinding(CommonBinding):
    """`horovod.torch`, below its Python functions: those wait without a time limit."""

    mpi_ops = mpi_ops

    @override
    def stop(self) -> None:
        if not self.is_running():
            return
        super().stop()
        _lib.horovod_torch_reset()
        _in_use.clear()

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
        given = _tensor(source, shape)
        result = given if target.address == source.address else _tensor(target, shape)
        call = _function("allreduce", source.dtype)
        return _submit(call, (given, result), given, result, 1, name.encode(), _OPS[op], 1.0, scale, members)

    @override
    def allgather(
        self, source: Buffer, target: Buffer | None, *, shape: Sequence[int], name: str, members: int
    ) -> Pending:
        given = _tensor(source, shape)
        result = _output(target, source.dtype, shape)
        call = _function("allgather", source.dtype)
        return _submit(call, (given, result), given, result, name.encode(), members)

    @override
    def broadcast(self, buffer: Buffer, *, shape: Sequence[int], root: int, name: str, members: int) -> Pending:
        tensor = _tensor(buffer, shape)
        call = _function("broadcast", buffer.dtype)
        return _submit(call, (tensor, tensor), tensor, tensor, root, name.encode(), members)

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
        given = _tensor(source, shape)
        result = _output(target, source.dtype, shape)
        sent = torch.tensor(list(splits), dtype=torch.int32)
        received = torch.empty(len(splits), dtype=torch.int32)
        call = _function("alltoall", source.dtype)
        pending = _submit(call, (given, result, sent, received), given, sent, result, received, name.encode(), members)
        pending._received = received
        return pending

    @override
    def reducescatter(
        self, source: Buffer, target: Buffer, *, shape: Sequence[int], scale: float, name: str, members: int
    ) -> Pending:
        given = _tensor(source, shape)
        result = _output(target, source.dtype, shape)
        call = _function("reducescatter", source.dtype)
        return _submit(call, (given, result), given, result, name.encode(), _OPS[ReduceOp.SUM], members, 1.0, scale)

    @override
    def join(self) -> Pending:
        last = torch.tensor(-1, dtype=torch.int32)
        return _submit(_lib.horovod_torch_join, (last, last), last, -1)


def _submit(call: Any, tensors: tuple[torch.Tensor, ...], *arguments: Any) -> _TorchPending:
    """Give an operation to Horovod; the second of `tensors` is its output."""
    try:
        handle = call(*arguments)
    except RuntimeError as exc:
        raise OperationFailed(str(exc)) from None
    _in_use[handle] = tensors
    return _TorchPending(handle, tensors[1])


def _function(operation: str, dtype: DType) -> Any:
    return getattr(_lib, f"horovod_torch_{operation}_async_{_DTYPES[dtype][1]}")


def _output(target: Buffer | None, dtype: DType, shape: Sequence[int]) -> torch.Tensor:
    """Return the tensor for Horovod to size and fill: over the target's memory, or new memory."""
    if target is None or not target.count:
        return torch.empty(0, dtype=_DTYPES[dtype][0])
    return _tensor(target, (target.count // prod(shape[1:]), *shape[1:]))


def _tensor(buffer: Buffer, shape: Sequence[int]) -> torch.Tensor:
    dtype = _DTYPES[buffer.dtype][0]
    if not buffer.count:
        return torch.empty(tuple(shape), dtype=dtype)
    owner = buffer.owner
    if isinstance(owner, torch.Tensor) and owner.dtype is dtype and owner.is_contiguous() and owner.is_cpu:
        return owner.detach().view(tuple(shape))  # spares a detour that costs some microseconds
    memory = (ctypes.c_char * buffer.nbytes).from_address(buffer.address)
    memory.unidist_owner = owner  # type: ignore[attr-defined]  # the tensor keeps `memory`, `memory` the owner
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
