"""The state of one bucket: matrices with their factors and residuals, and the buffers that are exchanged.

Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical low-rank gradient compression for distributed optimization",
https://arxiv.org/abs/1905.13727, algorithm 1 with the feedback of algorithm 2. In a round, for each matrix, which is
M_r on rank r:

    M_r += E_r;  P = orthonormal basis of sum_r(M_r Q);  E_r = M_r - P P' M_r;  Q = scale * sum_r(M_r' P);  result P Q'

All matrices of a bucket share two all-reduces, the first of which also carries what is not compressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from unidist.buffer import Buffer
from unidist.communicator import Work
from unidist.gradients.compression import Bucket, BucketCompressor

Array = npt.NDArray[Any]

SAVING = 2
"""A matrix is compressed if that divides its bytes by this at least."""


@dataclass
class _Matrix:
    """One compressed gradient, n x m, approximated with rank k."""

    gradient: Array  # (n, m), in the bucket
    left_out: Array  # (n, m)
    left: Array  # P (n, k), travels first
    right: Array  # Q (m, k), travels second


class PowerSGDBucket(BucketCompressor):
    """See the module's text.

    Args:
        bucket: of floating-point numbers in host memory.
        rank: of the approximations.
        warmup: rounds without compression.
    """

    def __init__(self, bucket: Bucket, *, rank: int, warmup: int) -> None:
        self._bucket = bucket
        self._rounds_to_go = warmup
        self._random = np.random.default_rng(0)  # equal on every rank
        whole = _array(bucket.memory)
        parts = [
            (whole[slot.offset : slot.offset + slot.count], (shape[0], -1) if len(shape := item.shape) > 1 else None)
            for slot, item in zip(bucket.layout.slots, bucket.parameters, strict=True)
        ]
        plain = [part for part, shape in parts if shape is None or not _pays(part, shape[0], rank)]
        matrices = [part.reshape(shape) for part, shape in parts if shape is not None and _pays(part, shape[0], rank)]
        num_plain = sum(part.size for part in plain)
        self._first = self._wire(num_plain + sum(matrix.shape[0] * rank for matrix in matrices))
        self._second = self._wire(sum(matrix.shape[1] * rank for matrix in matrices))
        first, second = _Pieces(_array(self._first)), _Pieces(_array(self._second))
        self._plain = [(part, first.take(part.size)) for part in plain]
        self._matrices = [
            _Matrix(
                matrix,
                np.zeros_like(matrix),
                first.take(matrix.shape[0] * rank).reshape(-1, rank),
                second.take(matrix.shape[1] * rank).reshape(-1, rank),
            )
            for matrix in matrices
        ]
        for each in self._matrices:
            self._draw(each)

    @property
    def num_matrices(self) -> int:
        """Number of gradients that are compressed."""
        return len(self._matrices)

    @override
    def allreduce(self, scale: float) -> Work:
        communicator = self._bucket.communicator
        if self._rounds_to_go:
            self._rounds_to_go -= 1
            return communicator.allreduce(self._bucket.memory, self._bucket.memory, scale=scale)
        for part, wire in self._plain:
            wire[:] = part
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite shall show in the result
            for each in self._matrices:
                each.gradient += each.left_out
                np.matmul(each.gradient, each.right, out=each.left)
        return _SecondHalf(self, communicator.allreduce(self._first, self._first, scale=scale), scale)

    def complete(self, scale: float) -> None:
        """Run the second all-reduce after the first, and write the result to the bucket."""
        for part, wire in self._plain:
            part[:] = wire
        with np.errstate(invalid="ignore", over="ignore"):
            remainders = []
            for each in self._matrices:
                each.left[:] = np.linalg.qr(each.left)[0]
                np.matmul(each.gradient.T, each.left, out=each.right)
                remainders.append(each.gradient - each.left @ each.right.T)
            self._bucket.communicator.allreduce(self._second, self._second, scale=scale).wait()
            for each, remainder in zip(self._matrices, remainders, strict=True):
                np.matmul(each.left, each.right.T, out=each.gradient)
                if np.isfinite(each.right).all():
                    each.left_out[:] = remainder
                # else this update will be skipped, and what was left out before still is.
                if not np.isfinite(each.right).all() or not each.right.any(axis=0).all():
                    self._draw(each)  # a direction of zeros would stay one

    def _draw(self, matrix: _Matrix) -> None:
        matrix.right[:] = self._random.standard_normal(matrix.right.shape)

    def _wire(self, count: int) -> Buffer:
        dtype = self._bucket.memory.dtype
        return self._bucket.communicator.allocate(count * dtype.itemsize).cast(dtype)


class _SecondHalf(Work):
    def __init__(self, bucket: PowerSGDBucket, first: Work, scale: float) -> None:
        self._bucket: PowerSGDBucket | None = bucket
        self._first = first
        self._scale = scale

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        self._first.wait(timeout)
        if self._bucket is not None:
            bucket, self._bucket = self._bucket, None
            bucket.complete(self._scale)

    @override
    def done(self) -> bool:
        """See `Work.done`; the second half is done by `wait`."""
        return self._bucket is None


class _Pieces:
    """Consecutive pieces of an array."""

    def __init__(self, array: Array) -> None:
        self._rest = array

    def take(self, count: int) -> Array:
        """Return the next `count` elements."""
        piece, self._rest = self._rest[:count], self._rest[count:]
        return piece


def _pays(part: Array, num_rows: int, rank: int) -> bool:
    if not part.size:
        return False
    num_columns = part.size // num_rows
    return rank <= min(num_rows, num_columns) and SAVING * rank * (num_rows + num_columns) <= part.size


def _array(buffer: Buffer) -> Array:
    return np.frombuffer(buffer.bytes(), buffer.dtype.value)
