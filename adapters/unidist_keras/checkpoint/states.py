"""Ordinary Keras models, optimizers and random generators as the states of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from unidist.checkpoint.format.interface import STATE_ATTRIBUTE, KeepsState, Plain, SavedSection, placements_of
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, TensorInfo
from unidist.checkpoint.framework_states import FrameworkStates
from unidist.checkpoint.rng import RandomState
from unidist.errors import UsageError
from unidist.optim.update import Update, update_of
from unidist_keras.checkpoint.names import stable_paths
from unidist_keras.checkpoint.optimizer import OptimizerState
from unidist_keras.checkpoint.tensors import dtype_of, piece_of, read_into
from unidist_keras.seeds import seeds_of


class KerasStates(FrameworkStates):
    """The states of Keras models, optimizers and random generators.

    An adapter's class sets `framework`, and says how the state of a sharded optimizer is loaded. A bound optimizer has
    its binding in the attribute `_unidist`, with its `inner` step and `_update`.
    """

    @override
    def model(self, model: Any) -> KeepsState:
        return ModelState(model)

    @override
    def optimizer(self, optimizer: Any, models: Mapping[str, Any]) -> KeepsState:
        if not models:
            raise UsageError("the paths of an optimizer's variables are those of its model: give the model too")
        bound = binding_of(optimizer)
        state = None if bound is None else self.sharded_optimizer(optimizer, bound, models)
        return OptimizerState(optimizer, models) if state is None else state

    def sharded_optimizer(self, optimizer: Any, binding: Any, models: Mapping[str, Any]) -> KeepsState | None:
        """Return the state of an optimizer of which this rank has a shard; None: every rank has all of it.

        Args:
            optimizer: bound.
            binding: of it.
            models: whose variables it updates, by prefix of their paths.
        """
        state: KeepsState | None = binding.inner.kept_state(models)
        return state

    @override
    def random(self, rank: int, models: Mapping[str, Any]) -> KeepsState:
        return KerasRandom(rank, models)

    @override
    def piece(self, name: str, tensor: Any) -> Piece:
        return piece_of(TensorInfo(name, tuple(tensor.shape), dtype_of(tensor)), Part.whole(tensor.shape), tensor)

    @override
    def update(self, optimizer: Any) -> Update | None:
        return update_of(optimizer)

    @override
    def prepare_to_load(self, optimizer: Any) -> None:
        """Build an optimizer whose state is sharded, so that it can be loaded."""
        bound = binding_of(optimizer)
        if bound is not None:
            bound.build_to_load()


def binding_of(optimizer: Any) -> Any:
    """Return the binding of a bound optimizer; None for another one."""
    return getattr(optimizer, "__dict__", {}).get(STATE_ATTRIBUTE)


class ModelState(KeepsState):
    """The weights of a model, trainable or not. Seeds belong to the random generators, metrics are not saved.

    Args:
        model: built.
    """

    def __init__(self, model: Any) -> None:
        if not getattr(model, "built", True):
            raise UsageError(
                f"the model {model.name!r} is not built: it has no weights yet. Call model.build(input_shape), or the "
                "model on one batch, before"
            )
        placements = placements_of(model)
        self._places: list[tuple[TensorInfo, Part, Any]] = []
        for path, variable in stable_paths(model.weights).items():
            dtype = dtype_of(variable)
            placement = placements.placement(path, tuple(variable.shape), dtype)
            self._places.append((placement.tensor(dtype), placement.part(), variable))

    @override
    def pieces(self) -> Sequence[Piece]:
        return [piece_of(info, part, variable) for info, part, variable in self._places]

    @override
    def values(self) -> dict[str, Plain]:
        return {}

    @override
    def check(self, section: SavedSection, *, strict: bool) -> None:
        section.match([info for info, _, _ in self._places], strict=strict)

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        for info, part, variable in self._places:
            if info.name in section.tensors:
                read_into(section, info.name, part, variable)


class KerasRandom(RandomState):
    """The seeds of the models' layers, beside the generators of Python and numpy.

    The seed that Keras uses for layers and operations outside of models cannot be reached.

    Args:
        rank: of this process.
        models: by prefix of their paths.
    """

    def __init__(self, rank: int, models: Mapping[str, Any]) -> None:
        super().__init__(rank)
        self._variables: dict[str, Any] = {}
        for prefix, model in models.items():
            for number, variable in enumerate(seeds_of(model)):
                self._variables[f"keras.seed.{prefix}.{number}"] = variable
        self._variables.update(self.others())

    def others(self) -> dict[str, Any]:
        """Return the variables of further generators, by name: those of a backend."""
        return {}

    @override
    def tensors(self) -> Sequence[Piece]:
        return [
            piece_of(
                TensorInfo(self.name(name), tuple(each.shape), dtype_of(each)), Part.whole(tuple(each.shape)), each
            )
            for name, each in self._variables.items()
        ]

    @override
    def set_tensor(self, generator: str, section: SavedSection, name: str) -> None:
        variable = self._variables.get(generator)
        if variable is not None and section.tensors[name].dtype == dtype_of(variable):  # else of another backend
            read_into(section, name, Part.whole(tuple(variable.shape)), variable)
