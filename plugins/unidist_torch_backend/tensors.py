"""Tensors as flat memory for a communicator: checks, and copies only where the memory is not flat already."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, Work
from unidist.errors import UsageError
from unidist_torch.memory import DTYPES, tensor_of

_SMALL_BYTES = 8192
"""Up to this, engines copy the payload anyway."""

_KEPT_BYTES = 256 << 20
_KEPT_PIECES = 32

Finish = Callable[[], None]


class CallOperation(NamedTuple):
    """One operation of a call.

    Attributes:
        post: issues it, on a communicator of the group.
        finish: what follows when it is complete: it brings results to their tensors, and gives memory back.
    """

    post: Callable[[Communicator], Work]
    finish: Finish | None


def together(first: Finish | None, second: Finish | None) -> Finish | None:
    """Return what does both, one after the other."""
    if first is None or second is None:
        return first or second

    def finish() -> None:
        first()
        second()

    return finish


def plain(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return a tensor whose memory holds its values in order: the same one if possible, else a copy.

    Args:
        tensor: dense or strided, on the CPU.
        what: the operation, for messages.

    Raises:
        UsageError: the tensor is on another device, or sparse.
    """
    if tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous():
        if not tensor.is_complex() or not tensor.is_conj():
            return tensor
        return tensor.resolve_conj()
    if not tensor.is_cpu:
        raise UsageError(
            f"{what} by backend unidist: it moves CPU tensors, and this one is on {tensor.device}. "
            "Use backend nccl for it, or copy it to the CPU."
        )
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"{what} by backend unidist: a tensor of layout {tensor.layout} has no flat memory. "
            "All-reduce takes sparse tensors; for others exchange indices and values."
        )
    return tensor.contiguous()


def buffer(tensor: torch.Tensor) -> Buffer:
    """Return the memory of a plain tensor. Element types without arithmetic (float8, quantized) are bytes."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        return Buffer(tensor.data_ptr(), tensor.numel() * tensor.element_size(), DType.UINT8, tensor)
    return Buffer(tensor.data_ptr(), tensor.numel(), dtype, tensor)


def reducible(tensor: torch.Tensor, what: str) -> None:
    """Raise UsageError unless the element type can be reduced."""
    if tensor.dtype not in DTYPES:
        raise UsageError(f"{what} by backend unidist: {tensor.dtype} cannot be reduced; choices: {', '.join(DType)}")


def output(tensor: torch.Tensor, what: str) -> tuple[torch.Tensor, Finish | None]:
    """Return a plain tensor for a result, and what brings the result to `tensor` when that is another one."""
    flat = plain(tensor, what)
    if flat is tensor:
        return tensor, None
    return flat, lambda: _copy(tensor, flat)


def joined(tensors: Sequence[torch.Tensor], what: str) -> torch.Tensor | None:
    """Return one flat tensor over the memory of plain tensors that follow each other there, or None."""
    first = tensors[0]
    storage, dtype, at = first.untyped_storage().data_ptr(), first.dtype, first.data_ptr()
    for tensor in tensors:
        if (
            plain(tensor, what) is not tensor
            or tensor.dtype is not dtype
            or tensor.data_ptr() != at
            or tensor.untyped_storage().data_ptr() != storage
        ):
            return None
        at += tensor.numel() * tensor.element_size()
    return first.detach().as_strided((sum(tensor.numel() for tensor in tensors),), (1,), first.storage_offset())


def check_dtypes(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raise UsageError unless all tensors have one element type."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise UsageError(
            f"{what} by backend unidist: tensors of one call have one dtype, not {sorted(map(str, dtypes))}"
        )


class TensorScratch:
    """Engine memory for tensors that are not flat, used again by later operations.

    Args:
        communicator: allocates.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._kept: list[Buffer] = []
        self._returned: deque[Buffer] = deque()  # by the collector, in the middle of anything
        self._is_open = True

    def empty(self, count: int, like: torch.Tensor) -> tuple[torch.Tensor, Finish]:
        """Return a flat tensor of a dtype, with any content, and what gives its memory back after the last use."""
        nbytes = count * like.element_size()
        if nbytes <= _SMALL_BYTES:
            return torch.empty(count, dtype=like.dtype), _nothing
        memory = self._take(nbytes)
        flat = tensor_of(memory)[:nbytes].view(like.dtype)
        return flat, lambda: self._give_back(memory)

    def join(self, tensors: Sequence[torch.Tensor], what: str, *, copy: bool) -> tuple[torch.Tensor, Finish]:
        """Return a flat tensor for several: their own memory if they follow each other there.

        Args:
            tensors: of one dtype.
            what: the operation, for messages.
            copy: fill the flat tensor with their values.
        """
        check_dtypes(tensors, what)
        found = joined(tensors, what)
        if found is not None:
            return found, _nothing
        flat, release = self.empty(sum(tensor.numel() for tensor in tensors), tensors[0])
        if copy:
            for tensor, piece in zip(tensors, pieces_of(flat, tensors), strict=True):
                _copy(piece, tensor)
        return flat, release

    def lend(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor in engine memory, which comes back here with its last view. Its content is undefined."""
        nbytes = count * dtype.itemsize
        memory = self._take(max(nbytes, 1))
        lent = Buffer(memory.address, memory.nbytes, DType.UINT8, _Lent(self, memory))
        return tensor_of(lent)[:nbytes].view(dtype)

    def clear(self) -> None:
        """Release the memory; what is still lent is released with its last view."""
        self._is_open = False
        self._returned.clear()
        self._kept.clear()

    def take_back(self, memory: Buffer) -> None:
        """Take what was lent; called in whichever thread drops the last view."""
        if self._is_open:
            self._returned.append(memory)

    def _take(self, nbytes: int) -> Buffer:
        while self._returned:
            self._give_back(self._returned.popleft())
        for index, memory in enumerate(self._kept):
            if nbytes <= memory.nbytes <= 2 * nbytes:
                return self._kept.pop(index)
        return self._communicator.allocate(nbytes)

    def _give_back(self, memory: Buffer) -> None:
        if memory.nbytes <= _KEPT_BYTES:
            self._kept.append(memory)
        while len(self._kept) > _KEPT_PIECES or sum(kept.nbytes for kept in self._kept) > _KEPT_BYTES:
            self._kept.pop(0)


class _Lent:
    """Keeps engine memory while a tensor refers to it."""

    __slots__ = ("_memory", "_scratch")

    def __init__(self, scratch: TensorScratch, memory: Buffer) -> None:
        self._scratch = scratch
        self._memory = memory

    def __del__(self) -> None:
        self._scratch.take_back(self._memory)


def pieces_of(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of a flat tensor, in the tensors' shapes."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def spread(flat: torch.Tensor, tensors: Sequence[torch.Tensor], release: Finish) -> Finish | None:
    """Return what brings a flat result to several tensors, and gives its memory back; None if it is there already."""
    if release is _nothing and all(
        piece.data_ptr() == tensor.data_ptr() for piece, tensor in zip(pieces_of(flat, tensors), tensors, strict=True)
    ):
        return None

    def finish() -> None:
        for piece, tensor in zip(pieces_of(flat, tensors), tensors, strict=True):
            _copy(tensor, piece)
        release()

    return finish


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _nothing() -> None:
    pass
