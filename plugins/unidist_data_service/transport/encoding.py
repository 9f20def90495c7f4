"""Batches as a tree of JSON and the bytes of their arrays.

A batch consists of dicts, lists, tuples, numbers, text, None and arrays. Arrays of PyTorch come back as tensors, all
others as arrays of numpy.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unidist.errors import UsageError

_ALIGNMENT = 64


@dataclass(frozen=True)
class ArrayInfo:
    """An array without its elements.

    Args:
        kind: "torch" or "numpy".
        dtype: its name there: "float32".
        shape: of the array.
        nbytes: its size.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class BatchArray:
    """An array of a batch.

    Args:
        info: its type and shape.
        data: its elements, flat.
    """

    info: ArrayInfo
    data: memoryview


def flatten(batch: Any) -> tuple[Any, list[BatchArray]]:
    """Return the tree of a batch, for JSON, and its arrays.

    Raises:
        UsageError: there is something in it that cannot be sent; names it.
    """
    leaves: list[BatchArray] = []
    return _flatten(batch, leaves, "the batch"), leaves


def unflatten(tree: Any, arrays: Sequence[Any]) -> Any:
    """Return the batch of a tree, with these arrays."""
    kind, value = tree
    if kind == "array":
        return arrays[value]
    if kind == "dict":
        return {name: unflatten(each, arrays) for name, each in value}
    if kind in ("list", "tuple"):
        items = [unflatten(each, arrays) for each in value]
        return items if kind == "list" else tuple(items)
    return base64.b64decode(value) if kind == "bytes" else value


def layout(infos: Sequence[ArrayInfo]) -> tuple[list[int], int]:
    """Return where each array begins in memory for all of them, and its size, in bytes."""
    offsets, size = [], 0
    for info in infos:
        offsets.append(size)
        size += -(-info.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, size


def _flatten(item: Any, leaves: list[BatchArray], where: str) -> list[Any]:
    if item is None or isinstance(item, bool | str):
        return ["plain", item]
    if type(item) in (int, float):
        return ["plain", item]
    if isinstance(item, bytes):
        return ["bytes", base64.b64encode(item).decode()]
    if isinstance(item, dict):
        wrong = [name for name in item if not isinstance(name, str)]
        if wrong:
            raise UsageError(f"{where} has the key {wrong[0]!r}: keys of dicts have to be text")
        return ["dict", [[name, _flatten(each, leaves, f"{where}[{name!r}]")] for name, each in item.items()]]
    if type(item) in (list, tuple):
        kind = "list" if isinstance(item, list) else "tuple"
        return [kind, [_flatten(each, leaves, f"{where}[{index}]") for index, each in enumerate(item)]]
    leaf = _leaf(item)
    if leaf is None:
        raise UsageError(
            f"{where} is a {type(item).__module__}.{type(item).__qualname__}, which a data worker cannot send: make it "
            "of dicts, lists, tuples, numbers, text, and dense arrays of numbers, in a collate function or a map"
        )
    leaves.append(leaf)
    return ["array", len(leaves) - 1]


def _leaf(item: Any) -> BatchArray | None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(item, torch.Tensor):
        return _leaf_of_tensor(item, torch)
    import numpy as np

    if isinstance(item, np.ndarray | np.generic) or hasattr(item, "__array__"):
        array = np.asarray(item)
        if array.dtype.hasobject or array.dtype.names is not None or array.dtype.kind in "USMm":
            return None
        flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return BatchArray(ArrayInfo("numpy", array.dtype.name, array.shape, flat.nbytes), memoryview(flat))
    return None


def _leaf_of_tensor(tensor: Any, torch: Any) -> BatchArray | None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    plain = tensor.detach().cpu().contiguous()
    name = str(plain.dtype).removeprefix("torch.")
    nbytes = plain.numel() * plain.element_size()
    flat = plain.reshape(-1).view(torch.uint8).numpy() if nbytes else bytearray()
    return BatchArray(ArrayInfo("torch", name, tuple(plain.shape), nbytes), memoryview(flat))
