"""Positions of the parameters of divided experts in the whole model: for checkpoints, norms and the exchange."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from typing_extensions import override

from unidist.buffer import DType
from unidist.checkpoint.format import Placement, PlacesParameters
from unidist.mesh import SHARD_REPLICA_AXES
from unidist_expert_parallel.layout.owners import AXIS, held_experts


class ExpertParameters(PlacesParameters):
    """Placements in a model of which each rank holds some experts.

    Args:
        stacked: paths of the parameters that hold an expert in each index of their first dim.
        lists: paths of the lists of experts, with the number of experts in the whole model.
        rank: of this rank on the axis.
        size: ranks of the axis.
        inner: of the model before it was divided.
    """

    def __init__(
        self, stacked: Collection[str], lists: Mapping[str, int], rank: int, size: int, inner: PlacesParameters
    ) -> None:
        self._stacked = frozenset(stacked)
        self._lists = dict(lists)
        self._rank = rank
        self._size = size
        self._inner = inner

    @override
    def placement(self, path: str, shape: Sequence[int], dtype: DType) -> Placement:
        if path not in self._stacked:
            return self._inner.placement(self._whole_path(path), shape, dtype)
        whole = (shape[0] * self._size, *shape[1:])
        held = held_experts(whole[0], self._rank, self._size)
        box = ((held.start, held.stop), *((0, count) for count in shape[1:]))
        return Placement(self._inner.placement(path, whole, dtype).name, whole, box)

    @override
    def copies(self, path: str) -> int:
        return self._inner.copies(self._whole_path(path)) * (1 if self._is_expert(path) else self._size)

    @override
    def gradient_axis(self, path: str) -> str:
        return SHARD_REPLICA_AXES if self._is_expert(path) else self._inner.gradient_axis(self._whole_path(path))

    @override
    def cut_axis(self, path: str) -> str | None:
        return AXIS if path in self._stacked else self._inner.cut_axis(self._whole_path(path))

    def _is_expert(self, path: str) -> bool:
        return path in self._stacked or self._list_of(path) is not None

    def _list_of(self, path: str) -> str | None:
        return next((each for each in self._lists if path.startswith(f"{each}.")), None)

    def _whole_path(self, path: str) -> str:
        """Return the path that a parameter or buffer has in the whole model: lists are numbered from 0 on each rank."""
        owner = self._list_of(path)
        if owner is None:
            return path
        number, _, rest = path.removeprefix(f"{owner}.").partition(".")
        held = held_experts(self._lists[owner], self._rank, self._size)
        return f"{owner}.{held.start + int(number)}.{rest}"
