"""Tensors as buffers and buffers as tensors, without copies."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from unidist.algorithms import copy_memory
from unidist.buffer import HOST, Buffer, DType
from unidist.errors import UsageError

__all__ = [
    "DTYPES", "TORCH_DTYPES", "CopyInto", "buffer_of", "copy_plain", "digest_of", "dtype_of", "is_dense",
    "is_plain_copy", "is_transforming", "memory_kind", "refuse_transformed", "tensor_of",
]  # fmt: skip

DTYPES: dict[torch.dtype, DType] = {
    torch.bool: DType.BOOL,
    torch.uint8: DType.UINT8,
    torch.int8: DType.INT8,
    torch.uint16: DType.UINT16,
    torch.int16: DType.INT16,
    torch.uint32: DType.UINT32,
    torch.int32: DType.INT32,
    torch.uint64: DType.UINT64,
    torch.int64: DType.INT64,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.complex64: DType.COMPLEX64,
    torch.complex128: DType.COMPLEX128,
}
TORCH_DTYPES = {ours: theirs for theirs, ours in DTYPES.items()}


def memory_kind(tensor: torch.Tensor) -> str:
    """Return "host" for CPU tensors, else the device's name with its index."""
    return HOST if tensor.device.type == "cpu" else str(tensor.device)


def dtype_of(tensor: torch.Tensor) -> DType:
    """Return the element type, or raise UsageError for one that has no counterpart (quantized, float8)."""
    try:
        return DTYPES[tensor.dtype]
    except KeyError:
        raise UsageError(f"tensors of {tensor.dtype} cannot be exchanged; choices: {', '.join(DType)}") from None


def buffer_of(tensor: torch.Tensor, *, is_ours: bool = False) -> Buffer:
    """Return the memory of a dense tensor that covers it without gaps, in memory order.

    The buffer keeps that memory, also if the tensor gets another one (`tensor.data = ...`, `tensor.set_()`). What
    changes the size of the memory itself (`tensor.resize_()`) must wait until nothing uses the buffer.

    Args:
        tensor: has the memory.
        is_ours: nobody else has this tensor, and can give it other memory, while the buffer is used.
    """
    dtype = DTYPES.get(tensor.dtype) or dtype_of(tensor)
    if tensor.layout is not torch.strided:
        raise UsageError(f"a tensor of layout {tensor.layout} has no flat memory; exchange indices and values")
    if not tensor.is_contiguous() and not is_dense(tensor):
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps; use contiguous()"
        )
    memory = HOST if tensor.is_cpu else memory_kind(tensor)
    try:
        address = tensor.data_ptr()
    except RuntimeError as exc:
        refuse_transformed(exc)
        raise
    return Buffer(address, tensor.numel(), dtype, tensor if is_ours else tensor.detach(), memory)


def digest_of(tensor: torch.Tensor) -> bytes:
    """Return a digest of the bits of a tensor's elements, in row-major order; of a sparse one in its dense form."""
    tensor = tensor.detach()
    whole = tensor if tensor.layout is torch.strided else tensor.to_dense()
    array = whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(array.data, digest_size=16).digest()


def is_transforming() -> bool:
    """Return whether a function runs within `torch.func` (`grad`, `jacrev`, `vmap`, ...): tensors have no memory."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def refuse_transformed(exc: Exception | None = None) -> None:
    """Raise UsageError within `torch.func`, whose tensors cannot be exchanged."""
    if is_transforming():
        raise UsageError(
            "ranks cannot exchange a tensor inside of a function that torch.func transforms (grad, vjp, jvp, jacrev, "
            "vmap): it has no memory there. For gradients and Jacobians use autograd (loss.backward(), "
            "torch.autograd.grad(..., create_graph=True)), or call the operation outside of the function. Models that "
            "exchange activations (tensor, context, expert, SyncBatchNorm) cannot be transformed; those of data and "
            "zero can"
        ) from exc


def is_plain_copy(source: torch.Tensor, stride: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether `copy_plain` can copy a tensor to host memory that is dense in this order."""
    return (
        copy_memory is not None
        and source.stride() == stride
        and source.dtype is dtype
        and source.is_cpu
        and not (source.is_conj() or source.is_neg())  # whose memory does not hold the values yet
    )


def copy_plain(target: int, source: int, nbytes: int) -> None:
    """Copy host memory by address, large amounts past the caches. Only where `is_plain_copy` says so."""
    assert copy_memory is not None, "asked for in is_plain_copy"
    copy_memory(target, source, nbytes)


class CopyInto:
    """Copies tensors into the same target repeatedly.

    CPU tensors of the target's memory order are copied as plain memory, large ones past the caches, which costs a
    third less.

    Args:
        target: its memory stays where it is.
    """

    __slots__ = ("_address", "_dtype", "_nbytes", "_stride", "_target")

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self._address = target.data_ptr()
        self._dtype = target.dtype
        self._stride = target.stride()
        nbytes = target.numel() * target.element_size()
        is_plain = copy_memory is not None and target.device.type == "cpu" and is_dense(target)
        self._nbytes = nbytes if is_plain else 0

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is the target's memory already."""
        return tensor.data_ptr() == self._address

    def copy(self, source: torch.Tensor) -> None:
        """Copy the values of `source`, of the target's shape."""
        if self._nbytes and copy_memory is not None and is_plain_copy(source, self._stride, self._dtype):
            copy_memory(self._address, source.data_ptr(), self._nbytes)
        else:
            with torch.no_grad():
                self._target.copy_(source)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the tensor covers its memory without gaps or overlap, in any order of dims (channels_last)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def tensor_of(buffer: Buffer, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Return a tensor over the buffer's memory; it keeps the buffer's owner alive. Flat unless `shape` is given."""
    dtype = TORCH_DTYPES[buffer.dtype]
    if buffer.memory == HOST:
        flat = _host_tensor(buffer, dtype)
    else:
        flat = _device_tensor(buffer, dtype)
    return flat if shape is None else flat.view(tuple(shape))


def _host_tensor(buffer: Buffer, dtype: torch.dtype) -> torch.Tensor:
    if not buffer.count:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * buffer.nbytes).from_address(buffer.address)
    memory.unidist_owner = buffer.owner  # type: ignore[attr-defined]  # the tensor keeps `memory`, `memory` the owner
    return torch.frombuffer(memory, dtype=dtype)


def _device_tensor(buffer: Buffer, dtype: torch.dtype) -> torch.Tensor:
    """Find the tensor that owns device memory: only the framework can make a view of it."""
    owner: Any = buffer
    while isinstance(owner, Buffer):
        owner = owner.owner
    if not isinstance(owner, torch.Tensor):
        raise UsageError(f"memory of kind {buffer.memory!r} that no tensor owns cannot be used by PyTorch")
    flat = owner.detach().as_strided((owner.numel(),), (1,)).view(torch.uint8)
    start = buffer.address - owner.data_ptr()
    return flat[start : start + buffer.nbytes].view(dtype)
