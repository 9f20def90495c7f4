"""Stores for a block's tensors until the backward pass: pinned host memory, or mapped files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

from unidist_activations._files import FileMemory

SMALLEST_BYTES = 1 << 16
"""Smaller tensors stay where they are: moving them would save nothing."""

Load = Callable[[], torch.Tensor]


class ActivationStore(ABC):
    """A place outside of the device."""

    @abstractmethod
    def put(self, tensor: torch.Tensor) -> Load:
        """Copy a strided tensor there, and return what brings it back: equal, of the same memory order."""


class HostStore(ActivationStore):
    """Host memory, pinned, for tensors of an accelerator: copies are ordered with what the device computes."""

    @override
    def put(self, tensor: torch.Tensor) -> Load:
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        device = tensor.device
        return lambda: copy.to(device, non_blocking=True)


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


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
