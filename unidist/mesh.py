"""The mesh: how ranks are arranged along named axes. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping

from unidist.errors import ConfigurationError, UsageError

__all__ = [
    "DATA_AXIS",
    "Mesh",
]

DATA_AXIS = "data"


class Mesh:
    """Ranks `0 .. world_size - 1` laid out row-major over axes, the first axis outermost.

    >>> mesh = Mesh({"pipeline": 2, "data": 2, "tensor": 2}, world_size=8)
    >>> mesh.coordinates(5)
    {'pipeline': 1, 'data': 0, 'tensor': 1}
    >>> mesh.group("data", rank=5)
    (5, 7)

    Args:
        axes: size by axis name, outermost first. At most one size is None: it takes what is left over.
        world_size: number of ranks.

    Raises:
        ConfigurationError: the sizes do not multiply to `world_size`; the message prints the equation.
    """

    def __init__(self, axes: Mapping[str, int | None], *, world_size: int) -> None:
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

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`; 1 for an axis that the mesh does not have."""
        return self.axes.get(axis, 1)

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The axes along which the model itself is divided: ranks on them hold different parts of it."""
        return tuple(name for name, size in self.axes.items() if name != DATA_AXIS and size > 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` on every axis."""
        self._check(rank)
        position = {}
        for name, size in reversed(self.axes.items()):
            rank, position[name] = divmod(rank, size)
        return {name: position[name] for name in self.axes}

    def group(self, axis: str, *, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along `axis` only, itself included, in axis order."""
        self._check(rank)
        if axis not in self.axes:
            return (rank,)
        stride = math.prod(size for name, size in self._after(axis))
        start = rank - self.coordinates(rank)[axis] * stride
        return tuple(start + i * stride for i in range(self.axes[axis]))

    def _after(self, axis: str) -> list[tuple[str, int]]:
        names = list(self.axes)
        return [(name, self.axes[name]) for name in names[names.index(axis) + 1 :]]

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
