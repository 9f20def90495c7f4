"""Reductions that torch.distributed's backends lack, expressed by those that they have."""

from __future__ import annotations

import torch

from unidist.communicator import ReduceOp
from unidist.errors import UsageError
from unidist_torch.scaling import scaled_integers

# What gloo and NCCL both reduce; other integers travel in the next wider type, which wraps around in the same way.
_NATIVE = {
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
_CARRIERS = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}


def is_native(dtype: torch.dtype) -> bool:
    """Return whether a reduction of this type needs no carrier."""
    return dtype in _NATIVE


class CarriedReduction:
    """One tensor's reduction: reduce `carrier` with `op`, then call `finish`; the outcome is in `result`.

    Args:
        result: flat tensor that holds this rank's values, and later the outcome.
        op: the reduction wanted.
        scale: factor for the outcome.
    """

    def __init__(self, result: torch.Tensor, op: ReduceOp, scale: float) -> None:
        self.result = result
        self.op = op
        self._scale = scale
        self._flip = False
        dtype = result.dtype
        if dtype is torch.bool:
            # "or" is the largest byte, "and" the smallest
            self.op = ReduceOp.MAX if op in (ReduceOp.SUM, ReduceOp.MAX) else ReduceOp.MIN
            self.carrier = result.view(torch.uint8)
        elif dtype.is_complex:
            if op is not ReduceOp.SUM:
                raise UsageError(
                    f"{op} of {dtype} is not supported by torch.distributed's engines; use sum, or engine shm"
                )
            self.carrier = torch.view_as_real(result).reshape(-1)
        elif dtype is torch.uint64:
            # The order of unsigned numbers is that of signed ones with the top bit flipped.
            self._flip = op in (ReduceOp.MIN, ReduceOp.MAX)
            self.carrier = result.view(torch.int64)
            if self._flip:
                self.carrier.bitwise_xor_(torch.iinfo(torch.int64).min)
        elif dtype in _NATIVE:
            self.carrier = result
        else:
            self.carrier = result.to(_CARRIERS[dtype])

    def finish(self) -> None:
        """Bring the outcome from the carrier to `result`, scaled."""
        if self._flip:
            self.carrier.bitwise_xor_(torch.iinfo(torch.int64).min)
        if self.carrier.data_ptr() != self.result.data_ptr():
            self.result.copy_(self.carrier)
        if self._scale == 1.0:
            return
        if self.result.is_floating_point() or self.result.is_complex():
            self.result.mul_(self._scale)
        elif self.result.dtype is not torch.bool:
            self.result.copy_(scaled_integers(self.result, self._scale))
