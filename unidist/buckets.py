"""Which gradient lies where: parameters packed into buckets. Pure arithmetic, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unidist.buffer import HOST, DType
from unidist.errors import UsageError

ALIGNMENT_BYTES = 64
"""Every gradient starts at a cache line, which vector code likes."""


@dataclass(frozen=True)
class ParameterInfo:
    """What the core knows of a parameter; equal on every rank.

    Args:
        name: its path in the model, or "parameter.<index>" where the path is not known.
        shape: as the framework gives it.
        dtype: of the gradient.
        memory: kind of memory that holds the gradient ("host", "cuda:0").
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    memory: str = HOST

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """The place of one gradient: elements `offset` to `offset + count` of its bucket."""

    parameter: int
    offset: int
    count: int


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: `count` elements of one dtype in one kind of memory, gradients in the order of becoming ready."""

    dtype: DType
    memory: str
    slots: tuple[Slot, ...]
    count: int


def plan_buckets(
    parameters: Sequence[ParameterInfo], *, bucket_bytes: int, first_bucket_bytes: int = 1 << 20
) -> tuple[BucketLayout, ...]:
    """Pack gradients into buckets of about `bucket_bytes`, in the order in which backward makes them ready.

    Backward runs through a model from its end, so parameters are taken in reverse. The first bucket is small,
    so that the first exchange starts early. A gradient larger than a bucket gets one of its own.

    Args:
        parameters: in registration order.
        bucket_bytes: soft limit of a bucket's size.
        first_bucket_bytes: soft limit of the first one.

    Returns:
        Buckets in the order in which they are exchanged.
    """
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes={bucket_bytes}: a bucket holds at least 1 byte")
    closed: list[BucketLayout] = []
    open_slots: dict[tuple[DType, str], list[Slot]] = {}
    filled: dict[tuple[DType, str], int] = {}

    def close(kind: tuple[DType, str]) -> None:
        slots = open_slots.pop(kind)
        closed.append(BucketLayout(kind[0], kind[1], tuple(slots), filled.pop(kind)))

    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        kind = (parameter.dtype, parameter.memory)
        item = parameter.dtype.itemsize
        limit = bucket_bytes if closed else min(first_bucket_bytes, bucket_bytes)
        if kind in open_slots and (filled[kind] + parameter.count) * item > limit:
            close(kind)
        slots = open_slots.setdefault(kind, [])
        offset = filled.get(kind, 0)
        slots.append(Slot(index, offset, parameter.count))
        step = max(1, ALIGNMENT_BYTES // item)
        filled[kind] = -(-(offset + parameter.count) // step) * step
    for kind in list(open_slots):
        close(kind)
    return tuple(closed)
