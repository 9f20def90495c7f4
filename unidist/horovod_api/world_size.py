"""The result of `size()` where several ranks train on the same samples: a number that notices how it is used."""

from __future__ import annotations

import warnings

from typing_extensions import override

from unidist.mesh import SAMPLE_AXES
from unidist.runtime.context import Context


class WorldSize(int):
    """The number of processes. Warns once if a number is divided by it, as numbers of samples are.

    `batch // size()` is right where every rank has its own samples. Along the other axes of the mesh ranks train on
    the same ones, so batches come out too small, and `DistributedSampler(data, size(), rank())` gives them different
    ones. An ordinary `int` in every other respect.
    """

    _warning: SizeWarning

    @classmethod
    def of(cls, runtime: Context) -> int:
        """Return the number of processes, as a plain `int` if no two of them train on the same samples."""
        size = runtime.topology.world_size
        if runtime.mesh.size(SAMPLE_AXES) == size:
            return size
        made = cls(size)
        made._warning = runtime.owned(SizeWarning)
        return made

    @override
    def __rfloordiv__(self, other: int) -> int:
        self._notice(other, f"{other} // size()")
        return super().__rfloordiv__(other)

    @override
    def __rtruediv__(self, other: int) -> float:
        self._notice(other, f"{other} / size()")
        return super().__rtruediv__(other)

    @override
    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)

    def _notice(self, other: int, expression: str) -> None:
        if other != 1:  # the mean over all ranks
            self._warning.give(expression)


class SizeWarning:
    """The warning of one runtime; rank 0 gives it once.

    Args:
        runtime: of this process.
    """

    def __init__(self, runtime: Context) -> None:
        mesh = runtime.mesh
        dividing = mesh.members(SAMPLE_AXES)
        axes = " and ".join(f"{name}={size}" for name, size in mesh.axes.items() if size > 1 and name not in dividing)
        self._text = (
            f"size() is {mesh.world_size}, but samples are divided over {mesh.size(SAMPLE_AXES)} rank(s) only: ranks "
            f"along {axes} train on the same ones. Use data_size() and data_rank(), or shard()"
        )
        self._is_due = runtime.topology.rank == 0

    def give(self, expression: str) -> None:
        """Warn of the script's line, three calls up from here."""
        if self._is_due:
            self._is_due = False
            warnings.warn(f"{expression}: {self._text}", UserWarning, stacklevel=4)

    def close(self) -> None:
        """Nothing to give back."""
