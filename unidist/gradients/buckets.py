"""The layout of gradients in buckets. Pure arithmetic, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unidist.buffer import HOST, DType
from unidist.errors import UsageError
from unidist.mesh import REPLICA_AXES

ALIGNMENT_BYTES = 64
"""Every gradient starts at a cache line, which vector code likes."""


@dataclass(frozen=True)
class ParameterInfo:
    """The core's description of a parameter; equal on every rank.

    Args:
        name: its path in the model, or "parameter.<index>" if the path is not known.
        shape: in the framework's order of dims.
        dtype: of the gradient.
        memory: kind of memory that holds the gradient ("host", "cuda:0").
        group: gradients with the same group number are exchanged in one bucket; None leaves that to the packing.
        copies: number of ranks along the axes of the model that hold this parameter, including this rank, so that
            each of its elements counts once in a norm.
        gradient_axis: the mesh axis over whose ranks its gradient is summed, see `PlacesParameters.gradient_axis`.
        cut_axis: the mesh axis over whose ranks the parameter is cut, so that this is a part of it; None: it is whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    memory: str = HOST
    group: int | None = None
    copies: int = 1
    gradient_axis: str = REPLICA_AXES
    cut_axis: str | None = None

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
    """One bucket: `count` elements of one dtype in one kind of memory, gradients in the order of becoming ready.

    All its parameters have the same number of `copies`.
    """

    dtype: DType
    memory: str
    slots: tuple[Slot, ...]
    count: int
    copies: int = 1


def plan_buckets(
    parameters: Sequence[ParameterInfo], *, bucket_bytes: int, first_bucket_bytes: int = 1 << 20
) -> tuple[BucketLayout, ...]:
    """Pack gradients into buckets of about `bucket_bytes`, in the order in which the backward pass produces them.

    Backward runs through a model from its end, so parameters are taken in reverse. The first bucket is small,
    so that the first exchange starts early. A gradient larger than a bucket gets a separate one. The gradients of a
    `ParameterInfo.group` share one bucket of whatever size (one per dtype, kind of memory and number of copies).

    Args:
        parameters: in registration order.
        bucket_bytes: soft limit of a bucket's size.
        first_bucket_bytes: soft limit of the first one.

    Returns:
        Buckets in the order in which they are exchanged.
    """
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes={bucket_bytes}: a bucket holds at least 1 byte")
    packed = _Packing()
    grouped: dict[tuple[int, _BucketKind], _Packing] = {}
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        if parameter.group is None:
            limit = bucket_bytes if packed.closed else min(first_bucket_bytes, bucket_bytes)
            packed.add(index, parameter, limit)
        else:
            grouped.setdefault((parameter.group, _kind(parameter)), _Packing()).add(index, parameter, None)
    buckets = packed.close_all()
    if grouped:
        buckets += [bucket for packing in grouped.values() for bucket in packing.close_all()]
        # A bucket is complete when the gradient of its first parameter is there, which comes last.
        buckets.sort(key=lambda bucket: -bucket.slots[-1].parameter)
    return tuple(buckets)


_BucketKind = tuple[DType, str, int]


def _kind(parameter: ParameterInfo) -> _BucketKind:
    """Return what parameters of one bucket have in common."""
    return parameter.dtype, parameter.memory, parameter.copies


class _Packing:
    """Buckets being filled, one at a time for each dtype, kind of memory and number of copies."""

    def __init__(self) -> None:
        self.closed: list[BucketLayout] = []
        self._slots: dict[_BucketKind, list[Slot]] = {}
        self._filled: dict[_BucketKind, int] = {}

    def add(self, index: int, parameter: ParameterInfo, limit: int | None) -> None:
        """Give parameter `index` the next place; a bucket that would grow beyond `limit` bytes is closed before."""
        kind = _kind(parameter)
        item = parameter.dtype.itemsize
        if limit is not None and kind in self._slots and (self._filled[kind] + parameter.count) * item > limit:
            self._close(kind)
        offset = self._filled.get(kind, 0)
        self._slots.setdefault(kind, []).append(Slot(index, offset, parameter.count))
        step = max(1, ALIGNMENT_BYTES // item)
        self._filled[kind] = -(-(offset + parameter.count) // step) * step

    def close_all(self) -> list[BucketLayout]:
        """Return every bucket, in the order in which they were closed."""
        for kind in list(self._slots):
            self._close(kind)
        return self.closed

    def _close(self, kind: _BucketKind) -> None:
        dtype, memory, copies = kind
        slots = tuple(self._slots.pop(kind))
        self.closed.append(BucketLayout(dtype, memory, slots, self._filled.pop(kind), copies))
