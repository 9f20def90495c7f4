"""Counts the memory that tensors of PyTorch really take."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts memory that operations got for their results while it is on, and that is still in use. No views."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if _has_memory(tensor)}
        for tensor in filter(_has_memory, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def now(self) -> int:
        return sum(num_bytes for ref, num_bytes in self._made.values() if not ref.expired())


def _has_memory(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "meta"
