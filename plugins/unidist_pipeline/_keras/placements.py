"""Names of a rank's variables in the whole model, and how many ranks hold them: for checkpoints and norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from unidist.buffer import DType
from unidist.checkpoint.format.interface import PlacesParameters
from unidist.checkpoint.format.pieces import Placement
from unidist.errors import UsageError
from unidist_keras.checkpoint import stable_paths


class StagePlacements(PlacesParameters):
    """See `PlacesParameters`: `placement` is called with stable paths, numbered among this rank's layers.

    Args:
        held: this rank's weights, in the order of its model.
        whole_paths: stable paths in the whole model, by the ids of its weights.
        num_holders: ranks of the pipeline that hold a variable, by its id.
        inner: where the variables of the whole model belong, which another strategy may have cut.
    """

    def __init__(
        self,
        held: Sequence[Any],
        whole_paths: Mapping[int, str],
        num_holders: Mapping[int, int],
        inner: PlacesParameters,
    ) -> None:
        self._inner = inner
        self._whole = {path: whole_paths[id(variable)] for path, variable in stable_paths(held).items()}
        self._num_holders = {str(variable.path): num_holders[id(variable)] for variable in held}

    @override
    def placement(self, path: str, shape: Sequence[int], dtype: DType) -> Placement:
        if path not in self._whole:
            listed = ", ".join(self._whole) or "none"
            raise UsageError(f"this rank's stages have no weight {path!r}; they have: {listed}")
        return self._inner.placement(self._whole[path], shape, dtype)

    @override
    def copies(self, path: str) -> int:
        """See `PlacesParameters.copies`; the path is the one that Keras gives, as optimizers have it."""
        return self._num_holders[path] * self._inner.copies(path)

    @override
    def gradient_axis(self, path: str) -> str:
        """See `PlacesParameters.gradient_axis`; the path is the one that Keras gives."""
        return self._inner.gradient_axis(path)
