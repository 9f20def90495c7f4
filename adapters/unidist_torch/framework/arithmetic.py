"""Arithmetic on flat memory in PyTorch: norms, clamping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from unidist.buffer import Buffer
from unidist_torch.memory import tensor_of

_CHUNK = 2**18
"""Elements that are widened at a time, where they are: they stay in the cache."""
_ROW = 2**10
"""Elements whose powers are added up in float32 (error: about 1e-7); the rows are added up in float64. A sum over
millions of elements in float32 is wrong in the fourth digit, and one in float64 takes 20 times as long."""


def norm(buffer: Buffer, order: float) -> float:
    """Return the norm of this order of a buffer, see `Framework.norm`."""
    tensor = tensor_of(buffer)
    if tensor.device.type != "cpu":
        return norms_on_device([tensor], order)[0]
    if math.isinf(order):
        return _largest(tensor)
    found = _in_chunks(tensor, order, torch.promote_types(tensor.dtype, torch.float32))
    return found if math.isfinite(found) else _in_chunks(tensor, order, _double(tensor))  # 1e20**2 may have overflowed


def norms(buffers: Sequence[Buffer], order: float) -> list[float]:
    """Return the norms of this order of some buffers, see `Framework.norms`."""
    tensors = [tensor_of(buffer) for buffer in buffers]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [norm(buffer, order) for buffer in buffers]
    return norms_on_device(tensors, order)


def norms_on_device(tensors: Sequence[torch.Tensor], order: float) -> list[float]:
    """Return the norms of tensors on one device, where sums are trees. The host waits once."""
    found = [torch.linalg.vector_norm(tensor, order, dtype=_double(tensor)) for tensor in tensors]
    listed: list[float] = torch.stack(found).cpu().tolist()
    return listed


def clamp(buffer: Buffer, limit: float) -> None:
    """Clamp a buffer in place to [-limit, limit], see `Framework.clamp`."""
    tensor = tensor_of(buffer)
    if limit < torch.finfo(tensor.dtype).max:
        tensor.clamp_(-limit, limit)


def _double(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _in_chunks(tensor: torch.Tensor, order: float, dtype: torch.dtype) -> float:
    norms = [_by_rows(chunk.to(dtype), order) for chunk in tensor.split(_CHUNK)]
    return float(torch.linalg.vector_norm(torch.cat(norms).double(), order))


def _by_rows(chunk: torch.Tensor, order: float) -> torch.Tensor:
    whole = chunk.numel() - chunk.numel() % _ROW
    rows = torch.linalg.vector_norm(chunk[:whole].view(-1, _ROW), order, dim=1)
    if whole == chunk.numel():
        return rows
    return torch.cat([rows, torch.linalg.vector_norm(chunk[whole:], order)[None]])


def _largest(tensor: torch.Tensor) -> float:
    if tensor.is_complex():
        return float(tensor.abs().max())
    low, high = torch.aminmax(tensor)  # both NaN if there is one
    return max(abs(float(low)), abs(float(high)))
