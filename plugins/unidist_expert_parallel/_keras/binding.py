"""Expert parallelism for Keras on TensorFlow: divides a model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from unidist.buffer import DType
from unidist.checkpoint.format import STATE_ATTRIBUTE, Placement, PlacesParameters, placements_of
from unidist.errors import ConfigurationError
from unidist.mesh import REPLICA_AXES, SAMPLE_AXES, SHARD_REPLICA_AXES
from unidist_expert_parallel._keras.layers.axis import ExpertAxis
from unidist_expert_parallel._keras.layers.mixture import MixtureOfExperts
from unidist_expert_parallel.binding import ExpertBinding
from unidist_expert_parallel.layout.owners import check_division, held_experts
from unidist_keras.checkpoint import stable_paths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unidist.runtime_api import RuntimeAPI
    from unidist_expert_parallel.strategy import ExpertParallel


class ExpertPlacements(PlacesParameters):
    """Placements of the variables of a model whose experts are divided.

    Args:
        inner: before they were.
        size: ranks of the axis.
    """

    def __init__(self, inner: PlacesParameters, size: int) -> None:
        self._inner = inner
        self._size = size
        self._placements: dict[str, Placement] = {}
        self._divided: set[str] = set()

    def add(self, stable_path: str, path: str, placement: Placement) -> None:
        """Record a divided variable; the path that Keras gives it may be another one's stable path."""
        self._placements[stable_path] = placement
        self._divided.add(path)

    @override
    def placement(self, path: str, shape: Sequence[int], dtype: DType) -> Placement:
        """See `PlacesParameters.placement`; the path is a stable one."""
        return self._placements.get(path) or self._inner.placement(path, shape, dtype)

    @override
    def copies(self, path: str) -> int:
        """See `PlacesParameters.copies`. The path is Keras' own."""
        return self._inner.copies(path) * (1 if path in self._divided else self._size)

    @override
    def gradient_axis(self, path: str) -> str:
        """See `PlacesParameters.gradient_axis`. The path is Keras' own."""
        return SHARD_REPLICA_AXES if path in self._divided else self._inner.gradient_axis(path)


class KerasExperts(ExpertBinding):
    """See `ExpertBinding`."""

    @override
    def partition(self, strategy: ExpertParallel, model: Any, context: RuntimeAPI) -> Any:
        found = _layers(model)
        if not found:
            raise ConfigurationError(
                f"expert={strategy.size}: no experts found in {type(model).__name__} {model.name!r}. Looked for layers "
                "unidist_expert_parallel.keras.MixtureOfExperts. Use data or tensor instead"
            )
        check_division({layer.path: layer.num_experts for layer in found}, strategy.size)
        if strategy.stages_see_no_model:
            raise ConfigurationError(
                "expert: with Keras a pipeline cannot divide a model with experts. Use expert with data or tensor, or "
                "PyTorch"
            )
        limited = [layer.path for layer in found if layer.capacity_factor is not None]
        if limited and context.axis_size(REPLICA_AXES) != context.axis_size(SAMPLE_AXES):
            raise ConfigurationError(
                f"expert: {limited[0]!r} has a capacity_factor, which drops the last tokens of a batch, and another "
                "strategy divides the sequence out of order. Set it to None"
            )
        axis = ExpertAxis(context)
        places = ExpertPlacements(placements_of(model), axis.size)
        stable = {id(variable): path for path, variable in stable_paths(model.weights).items()}
        for layer in found:
            whole = {id(variable): tuple(variable.shape) for variable in layer.weights}
            for variable in layer.divide(axis):
                shape = whole[id(variable)]
                held = held_experts(shape[0], axis.rank, axis.size)
                box = ((held.start, held.stop), *((0, count) for count in shape[1:]))
                path = stable[id(variable)]
                name = places.placement(path, shape, DType(np.dtype(variable.dtype).name)).name
                places.add(path, str(variable.path), Placement(name, shape, box))
        setattr(model, STATE_ATTRIBUTE, places)
        if context.topology.rank == 0:
            counts = " or ".join(str(count) for count in sorted({layer.num_experts for layer in found}))
            text = f"{len(found)} layers of {counts} experts, of which each rank holds one in {axis.size}"
            print(f"unidist: expert={axis.size}: {text}", file=sys.stderr, flush=True)
        return model

    @override
    def output_obstacle(self, model: Any) -> str:
        limited = next((layer.path for layer in _layers(model) if layer.capacity_factor is not None), None)
        return "" if limited is None else f"which tokens {limited!r} drops depends on the tokens of all ranks"


def _layers(model: Any) -> list[MixtureOfExperts]:
    return [layer for layer in model._flatten_layers() if isinstance(layer, MixtureOfExperts)]
