"""The mesh: how ranks are arranged along named axes. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from unidist.errors import ConfigurationError, UsageError

__all__ = [
    "DATA_AXIS",
    "REPLICA_AXES",
    "SAMPLE_AXES",
    "SHARD_REPLICA_AXES",
    "Divides",
    "Mesh",
]

DATA_AXIS = "data"

SAMPLE_AXES = "samples"
"""All axes whose ranks train on different samples, as one: samples are divided over its ranks."""
REPLICA_AXES = "replicas"
"""All axes whose ranks see different data and hold the same parameters, as one: gradients are averaged over its ranks.

Parameters that an axis of experts divides are the exception, see `SHARD_REPLICA_AXES`.
"""
SHARD_REPLICA_AXES = "shard replicas"
"""Of `REPLICA_AXES` those that divide no parameters either: the ranks that hold the same experts."""

Divides = Literal["model", "samples", "sequence"]
"""What is divided over the ranks of an axis: the model's parameters, the samples, or the tokens of each sample."""


class Mesh:
    """Ranks `0 .. world_size - 1` laid out row-major over axes, the first axis outermost.

    >>> mesh = Mesh({"pipeline": 2, "data": 2, "tensor": 2}, world_size=8)
    >>> mesh.coordinates(5)
    {'pipeline': 1, 'data': 0, 'tensor': 1}
    >>> mesh.group("data", rank=5)
    (5, 7)

    Several axes together are a composite axis: `SAMPLE_AXES`, `REPLICA_AXES` and `SHARD_REPLICA_AXES` can be given to
    `size`, `place` and `group` like the name of an axis.

    >>> mesh = Mesh({"data": 2, "context": 2}, world_size=4, divides={"context": ("sequence",)})
    >>> mesh.group(REPLICA_AXES, rank=1), mesh.group(SAMPLE_AXES, rank=1)
    ((0, 1, 2, 3), (1, 3))

    Args:
        axes: size by axis name, outermost first. At most one size is None: it takes what is left over.
        world_size: number of ranks.
        divides: what is divided over the ranks of an axis, by its name. Default: the samples on the data axis, the
            model on any other.

    Raises:
        ConfigurationError: the sizes do not multiply to `world_size`; the message prints the equation.
    """

    def __init__(
        self,
        axes: Mapping[str, int | None],
        *,
        world_size: int,
        divides: Mapping[str, tuple[Divides, ...]] | None = None,
    ) -> None:
        fixed = {name: size for name, size in axes.items() if size is not None}
        free = [name for name, size in axes.items() if size is None]
        for name, size in fixed.items():
            if size < 1:
                raise ConfigurationError(f"{name}={size}: the size of a mesh axis is at least 1.")
        if len(free) > 1:
            raise ConfigurationError(f"the sizes of {' and '.join(free)} are both open; give all but one.")
        product = math.prod(fixed.values())
        equation = " * ".join(f"{name}({size})" for name, size in fixed.items() if size > 1 or not free) or "1"
        if free and world_size % product:
            raise ConfigurationError(
                f"{equation} = {product} does not divide world_size {world_size}.{_advice(fixed, world_size)}"
            )
        if not free and product != world_size:
            raise ConfigurationError(
                f"{equation} = {product} is not world_size {world_size}. "
                f"Launch {product} processes, or change the sizes."
            )
        self.world_size = world_size
        self.axes: dict[str, int] = {
            name: world_size // product if size is None else size for name, size in axes.items()
        }
        given = divides or {}
        self._divides: dict[str, tuple[Divides, ...]] = {
            name: ("samples",) if name == DATA_AXIS else given.get(name, ("model",)) for name in axes
        }

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`; 1 for an axis that the mesh does not have."""
        return math.prod(self.axes.get(name, 1) for name in self.members(axis))

    def members(self, axis: str) -> tuple[str, ...]:
        """Return the axes that a composite axis consists of, outermost first; of any other axis, itself alone.

        Axes of one rank are left out, but the data axis is always in a composite one.
        """
        if axis not in (SAMPLE_AXES, REPLICA_AXES, SHARD_REPLICA_AXES):
            return (axis,)
        return tuple(
            name
            for name, divided in self._divides.items()
            if name == DATA_AXIS
            or (
                self.axes[name] > 1
                and ("samples" in divided or ("sequence" in divided and axis != SAMPLE_AXES))
                and not ("model" in divided and axis == SHARD_REPLICA_AXES)
            )
        )

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The axes along which the model itself is divided: ranks on them hold different parts of it."""
        return tuple(name for name, size in self.axes.items() if size > 1 and "model" in self._divides[name])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` on every axis."""
        self._check(rank)
        position = {}
        for name, size in reversed(self.axes.items()):
            rank, position[name] = divmod(rank, size)
        return {name: position[name] for name in self.axes}

    def place(self, axis: str, *, rank: int) -> int:
        """Return the position of `rank` along `axis`; 0 on an axis that the mesh does not have."""
        return self.group(axis, rank=rank).index(rank)

    def group(self, axis: str, *, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along `axis` only, itself included, in axis order."""
        position = self.coordinates(rank)
        start, offsets, stride = rank, [0], self.world_size
        members = self.members(axis)
        for name, size in self.axes.items():
            stride //= size
            if name in members:
                start -= position[name] * stride
                offsets = [offset + i * stride for offset in offsets for i in range(size)]
        return tuple(start + offset for offset in offsets)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank {rank} is not in this mesh of {self.world_size} ranks")

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes.items())})"


def _advice(fixed: Mapping[str, int], world_size: int) -> str:
    """Say which neighbouring choice would fit: one smaller axis, or another number of processes."""
    product = math.prod(fixed.values())
    tips = []
    for name in sorted(fixed, key=lambda axis: -fixed[axis]):
        others = product // fixed[name]
        fitting = [n for n in range(fixed[name] - 1, 1, -1) if world_size % (others * n) == 0]
        if fitting:
            tips.append(f"use {name}={fitting[0]}")
            break
    nearest = max(1, round(world_size / product)) * product
    tips.append(f"launch {nearest} processes")
    return f" {', or '.join(tips).capitalize()}."
