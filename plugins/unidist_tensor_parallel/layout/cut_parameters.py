"""Placements of the parts of a cut model, for checkpoints and for norms over the ranks. For every framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from unidist.buffer import DType
from unidist.checkpoint.format.interface import PlacesParameters
from unidist.checkpoint.format.pieces import Placement
from unidist_tensor_parallel.layout.cuts import AXIS, Cut


class CutParameters(PlacesParameters):
    """Placements in a model of which some parameters are cut.

    Args:
        cuts: by path, those that are cut.
        rank: of this rank on the axis.
        size: ranks on the axis.
        inner: of the model before it was cut.
    """

    def __init__(self, cuts: Mapping[str, Cut], rank: int, size: int, inner: PlacesParameters) -> None:
        self.cuts = dict(cuts)
        self._rank = rank
        self._size = size
        self._inner = inner

    @override
    def placement(self, path: str, shape: Sequence[int], dtype: DType) -> Placement:
        cut = self.cuts.get(path)
        if cut is None:
            return self._inner.placement(path, shape, dtype)
        whole = cut.whole_shape(shape)
        name = self._inner.placement(path, whole, dtype).name
        first, *more = cut.boxes(whole, self._rank)
        return Placement(name, whole, first, tuple(more))

    @override
    def copies(self, path: str) -> int:
        return self._inner.copies(path) * (1 if path in self.cuts else self._size)

    @override
    def gradient_axis(self, path: str) -> str:
        return self._inner.gradient_axis(path)

    @override
    def cut_axis(self, path: str) -> str | None:
        return AXIS if path in self.cuts else self._inner.cut_axis(path)
