"""Trees of JAX as the states of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from typing_extensions import override

from unidist.checkpoint.format.interface import HasKeptState, KeepsState, PlacesParameters
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece
from unidist.checkpoint.framework_states import FrameworkStates
from unidist.checkpoint.rng import RandomState
from unidist.errors import UsageError
from unidist.optim.update import Update
from unidist_jax.checkpoint.model import ModelState
from unidist_jax.checkpoint.optimizer import OptimizerState
from unidist_jax.checkpoint.tensors import info_of, piece_of
from unidist_jax.framework import JaxFramework
from unidist_jax.optimizer import BoundOptimizer, LeafPiece


class Training(ABC):
    """An object that holds parameters and optimizer state itself, as `TrainStep` does; `save` and `load` accept it.

    Attributes:
        optimizer: the bound optimizer.
        opt_state: the optimizer state of this rank.
    """

    optimizer: BoundOptimizer
    opt_state: Any

    @property
    @abstractmethod
    def held(self) -> Any:
        """What this rank holds of the parameters, a tree of arrays; can be set."""

    @held.setter
    @abstractmethod
    def held(self, held: Any) -> None: ...

    @property
    @abstractmethod
    def places(self) -> PlacesParameters | None:
        """Where these parameters belong in the whole model; None: each is whole."""

    @property
    @abstractmethod
    def state_places(self) -> PlacesParameters | None:
        """Where that belongs whose optimizer state this rank keeps; None: each parameter is whole."""

    @property
    @abstractmethod
    def holds_pieces(self) -> bool:
        """`held` has pieces of the parameters, the same as the optimizer state."""


class KeptParameters(HasKeptState):
    """A tree of parameters, or of other arrays, for `CheckpointObjects`, which takes a dict for several models.

    Args:
        params: the tree.
        put: see `ModelState`, also for the others.
        places: where parameters belong.
        pieces: of which elements the tree is.

    Attributes:
        state: the state that was made of it last.
    """

    def __init__(
        self,
        params: Any,
        put: Callable[[Any], object] | None = None,
        *,
        places: PlacesParameters | None = None,
        pieces: Sequence[LeafPiece] | None = None,
    ) -> None:
        self.state: ModelState | None = None
        self._make = lambda: ModelState(params, put, places=places, pieces=pieces)

    @override
    def kept_state(self) -> KeepsState:
        self.state = self._make()
        return self.state


class KeptOptimizer(HasKeptState):
    """An optimizer state, for `CheckpointObjects`. Collective if the optimizer shards its state.

    Args:
        params: the parameters.
        opt_state: the state.
        optimizer: a bound optimizer, or None.
        put: see `OptimizerState`.
        places: where parameters belong.

    Attributes:
        state: the state that was made of it last.

    Raises:
        UsageError: the optimizer is not distributed.
    """

    def __init__(
        self,
        params: Any,
        opt_state: Any,
        optimizer: Any = None,
        put: Callable[[Any], object] | None = None,
        *,
        places: PlacesParameters | None = None,
    ) -> None:
        if optimizer is not None and not isinstance(optimizer, BoundOptimizer):
            raise UsageError(
                f"optimizer= is a {type(optimizer).__name__}; give the one that distribute() has returned, or leave it "
                "out: the state says of itself what it is"
            )
        self.state: OptimizerState | None = None
        self._binding = None if optimizer is None else optimizer.binding
        pieces = None if self._binding is None else self._binding.pieces(params)
        self._make = lambda: OptimizerState(params, opt_state, self._loaded, places=places, pieces=pieces)
        self._put = put

    @property
    def update(self) -> Update | None:
        """The framework-free part of the bound optimizer."""
        return None if self._binding is None else self._binding.distributed_update

    @override
    def kept_state(self) -> KeepsState:
        self.state = self._make()
        return self.state

    def _loaded(self, opt_state: Any) -> None:
        if self._binding is not None:
            self._binding.inner.has_moved = False
        if self._put is not None:
            self._put(opt_state)


def kept_training(training: Training) -> tuple[KeptParameters, KeptOptimizer]:
    """Return the parts of a training, which takes what is loaded. Collective where the first step was not taken yet."""
    (held, opt_state), places = training_of_ranks(training), training.places
    pieces = training.optimizer.binding.pieces(held) if training.holds_pieces else None

    def put(name: str) -> Callable[[Any], object]:
        return lambda tree: setattr(training, name, jax.tree.map(jnp.array, tree))  # a copy, since steps donate it

    return (
        KeptParameters(held, put("held"), places=places, pieces=pieces),
        KeptOptimizer(held, opt_state, training.optimizer, put("opt_state"), places=training.state_places),
    )


class TakenParameters(HasKeptState):
    """A tree of parameters that takes the values of another one, some of its arrays at a time.

    Args:
        taker: the tree, or a training, which sets what it holds itself.

    Attributes:
        tree: with what was taken so far; of a training what this rank holds.
    """

    def __init__(self, taker: Any) -> None:
        self._training = taker if isinstance(taker, Training) else None
        self.tree = taker if self._training is None else taker.held

    @override
    def kept_state(self) -> KeepsState:
        places = pieces = None
        if self._training is not None:
            places, binding = self._training.places, self._training.optimizer.binding
            pieces = binding.pieces(self.tree) if self._training.holds_pieces else None
        return ModelState(self.tree, self._put, places=places, pieces=pieces)

    def _put(self, tree: Any) -> None:
        self.tree = tree
        if self._training is not None:
            self._training.held = jax.tree.map(jnp.array, tree)  # a copy, since steps donate it


def state_of_ranks(params: Any, opt_state: Any, optimizer: BoundOptimizer) -> Any:
    """Return an optimizer state, or the types of what this rank will have if it is that of other ranks.

    In a new generation of an elastic job each rank has other pieces, and gets them from the others.
    """
    return _fitting(opt_state, jax.eval_shape(optimizer.init, params))


def training_of_ranks(training: Training) -> tuple[Any, Any]:
    """Return the same of what a training holds, and of its optimizer state."""
    held, optimizer = training.held, training.optimizer
    if not training.holds_pieces:
        return held, state_of_ranks(held, training.opt_state, optimizer)
    pieces = optimizer.binding.pieces(held) or ()
    leaves, structure = jax.tree.flatten(held)

    def types(shapes: Sequence[tuple[int, ...]]) -> Any:
        made = [jax.ShapeDtypeStruct(shape, leaf.dtype) for shape, leaf in zip(shapes, leaves, strict=True)]
        return jax.tree.unflatten(structure, made)

    whole = types([piece.shape for piece in pieces])
    return (
        _fitting(held, types([piece.own_shape for piece in pieces])),
        state_of_ranks(whole, training.opt_state, optimizer),
    )


def _fitting(tree: Any, wanted: Any) -> Any:
    shapes = [[leaf.shape for leaf in jax.tree.leaves(each)] for each in (tree, wanted)]
    return tree if shapes[0] == shapes[1] else wanted


class JaxStates(FrameworkStates):
    """The states of trees and random generators."""

    framework = JaxFramework()

    @override
    def model(self, model: Any) -> KeepsState:
        return ModelState(model)

    @override
    def optimizer(self, optimizer: Any, models: Mapping[str, Any]) -> KeepsState:
        raise UsageError(f"optimizer: {type(optimizer).__name__} has no state in JAX: give the state, a tree")

    @override
    def random(self, rank: int, models: Mapping[str, Any]) -> KeepsState:
        """Return the generators of Python and numpy; JAX's random keys are values of the script's."""
        return RandomState(rank)

    @override
    def piece(self, name: str, tensor: Any) -> Piece:
        info = info_of(name, tensor)
        return piece_of(info, Part.whole(info.shape), tensor)

    @override
    def update(self, optimizer: Any) -> Update | None:
        return optimizer.update if isinstance(optimizer, KeptOptimizer) else None

    @override
    def prepare_to_load(self, optimizer: Any) -> None:
        """Do nothing: `KeptOptimizer` has prepared it."""
