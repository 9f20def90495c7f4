"""Stores for a block's tensors until the backward pass: pinned host memory, or mapped files."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

from unidist_activations._files import FileMemory
from unidist_torch.host_copies import copying

SMALLEST_BYTES = 1 << 16
"""Smaller tensors stay where they are: moving them would save nothing."""

Load = Callable[[], torch.Tensor]


class ActivationStore(ABC):
    """A place outside of the device."""

    @abstractmethod
    def put(self, tensor: torch.Tensor) -> Load:
        """Copy a strided tensor there, and return what brings it back: equal, of the same memory order."""

    def end_block(self) -> None:  # noqa: B027 - most stores need not know
        """A block's forward pass is over: what was put since the last call is needed together."""


class HostStore(ActivationStore):
    """Host memory, pinned, for tensors of an accelerator. With CUDA, copies have a stream of their own.

    A block's tensors leave the device while the next block computes, and those of the block before come back while one
    computes its gradients. So the device holds the tensors of two blocks, however far the host is ahead of it: the
    stream that computes waits for copies before it uses memory again, so the allocator need not know of them.
    """

    def __init__(self) -> None:
        self._block = _Block(self, None)
        self._put: list[tuple[torch.Tensor, torch.cuda.Event]] = []  # by the present block
        self._leaving: list[tuple[torch.Tensor, torch.cuda.Event]] = []  # those of the last one
        self._returning: Callable[[], _Block | None] = lambda: None  # the block whose gradients are computed

    @override
    def put(self, tensor: torch.Tensor) -> Load:
        copy = _Copy(self._block, tensor)
        if copy.event is not None:
            self._put.append((tensor, copy.event))
        self._block.copies.append(weakref.ref(copy))
        return copy.load

    @override
    def end_block(self) -> None:
        if self._block.copies:
            self._release()
            self._put, self._leaving = [], self._put
            self._block = _Block(self, weakref.ref(self._block))

    def enter_backward(self, block: _Block) -> None:
        """Bring back the tensors of a block whose gradients are computed now, and then those of the block before."""
        former = self._returning()
        if former is block:
            return
        self._release()
        self._returning = weakref.ref(block)
        if former is not None:
            former.release()
        block.fetch()
        before = block.before()
        if before is not None:
            before.fetch()

    def _release(self) -> None:
        """Give up the memory of the tensors that were put by the last block."""
        for tensor, copied in self._leaving:
            torch.cuda.current_stream(tensor.device).wait_event(copied)
        self._leaving.clear()


class _Block:
    """The tensors of one pass through a block. They keep this object, and it does not keep them."""

    def __init__(self, store: HostStore, before: weakref.ref[_Block] | None) -> None:
        self.store = store
        self.copies: list[weakref.ref[_Copy]] = []
        self.before: Callable[[], _Block | None] = before or (lambda: None)

    def fetch(self) -> None:
        """Bring all tensors back that are still needed."""
        for copy in self._needed():
            copy.fetch()

    def release(self) -> None:
        """Give up the tensors on the device that have been used; a graph that is retained fetches them again."""
        for copy in self._needed():
            copy.release()

    def _needed(self) -> list[_Copy]:
        return [copy for copy in (each() for each in self.copies) if copy is not None]


class _Copy:
    """A tensor in host memory.

    Args:
        block: that it belongs to.
        tensor: its memory may be used again when the present stream has waited for `event`.

    Attributes:
        event: the latest copy is complete; None: it was when it was made.
    """

    def __init__(self, block: _Block, tensor: torch.Tensor) -> None:
        self._block = block
        self._device = tensor.device
        self._returned: torch.Tensor | None = None
        self._is_used = False
        self._stream: torch.cuda.Stream | None = None
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self.event = self._queue(self._host, tensor)

    def load(self) -> torch.Tensor:
        """Return the tensor on its device."""
        self._block.store.enter_backward(self._block)
        returned = self.fetch()
        if self.event is not None:
            torch.cuda.current_stream(self._device).wait_event(self.event)
        self._is_used = True
        return returned

    def fetch(self) -> torch.Tensor:
        """Begin to copy it to the device, if it is not there; returns it."""
        if self._returned is None:
            # From the pool of the computing stream: the block that holds it may free it at any time.
            self._returned = torch.empty_like(self._host, device=self._device)
            self._is_used = False
            self.event = self._queue(self._returned, self._host)
        return self._returned

    def release(self) -> None:
        """Give up the tensor on the device, if it has been used."""
        if self._is_used:
            self._returned = None

    def _queue(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event | None:
        with copying(self._device) as self._stream:
            target.copy_(source, non_blocking=True)
        return None if self._stream is None else self._stream.record_event()

    def __del__(self) -> None:
        """Let the allocator know of a copy for which nobody has waited: it was begun for nothing."""
        if self._returned is not None and self._stream is not None and not self._is_used:
            self._returned.record_stream(self._stream)


class FileStore(ActivationStore):
    """Mapped files, for tensors of any device."""

    def __init__(self, memory: FileMemory) -> None:
        self._memory = memory

    @override
    def put(self, tensor: torch.Tensor) -> Load:
        like = torch.empty_like(tensor, device="meta")  # its strides are dense
        piece = self._memory.allocate(like.numel() * like.element_size())
        copy = torch.frombuffer(piece, dtype=like.dtype, count=like.numel()).as_strided(like.shape, like.stride())
        copy.copy_(tensor)
        FileMemory.let_go(piece)
        device = tensor.device
        return lambda: copy.to(device)


class Offload:
    """Moves the tensors that a block keeps to a store. One for each block."""

    def __init__(self, store: ActivationStore) -> None:
        self._store = store

    @contextmanager
    def of(self, module: torch.nn.Module) -> Iterator[None]:
        """Context in which kept tensors go to the store, except parameters, buffers and small tensors."""
        own = {_storage(tensor) for tensors in (module.parameters(), module.buffers()) for tensor in tensors}
        put: dict[tuple[Any, ...], tuple[torch.Tensor, Load]] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor | Load:
            if tensor.layout is not torch.strided or tensor.nbytes < SMALLEST_BYTES or _storage(tensor) in own:
                return tensor.detach()
            # Several operations keep the same tensor: it is moved once. Until the block is done the dictionary holds
            # it, so that no other tensor gets its address.
            view = (_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            key = (*view, tensor._version)
            if key not in put:
                put[key] = tensor.detach(), self._store.put(tensor.detach())
            return put[key][1]

        def unpack(packed: torch.Tensor | Load) -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else packed()

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            try:
                yield
            finally:
                put.clear()
                self._store.end_block()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
