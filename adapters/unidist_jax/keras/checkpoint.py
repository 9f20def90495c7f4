"""Checkpoints of Keras models and optimizers on JAX: `save`, `load` and `redistribute` of `unidist.keras`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import keras
from typing_extensions import override

from unidist.checkpoint.format.interface import KeepsState
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, Placement, TensorInfo
from unidist.checkpoint.job import CheckpointObjects, MappingLike, load_job, save_job
from unidist.checkpoint.loading import Loaded
from unidist.checkpoint.redistribution import ranks_of, redistribute_job
from unidist.checkpoint.save_request import OnError, SaveHandle
from unidist.errors import UsageError
from unidist.waits import calling
from unidist_arrays.memory import Array
from unidist_jax.checkpoint.places import ParameterPlace
from unidist_jax.compiled import translated
from unidist_jax.framework import JaxFramework
from unidist_jax.keras.binding import raise_failure
from unidist_jax.optimizer import LeafPiece
from unidist_keras import checkpoint


class _KerasFramework(JaxFramework):
    """JAX, where a model is one of Keras."""

    @override
    def is_model(self, value: object) -> bool:
        return isinstance(value, keras.layers.Layer)


class KerasStates(checkpoint.KerasStates):
    """The states of Keras models, optimizers and random generators."""

    framework = _KerasFramework()

    @override
    def sharded_optimizer(self, optimizer: Any, binding: Any, models: Mapping[str, Any]) -> KeepsState | None:
        pieces = binding.inner.pieces() if binding.inner.is_built else None
        return None if pieces is None else _OptimizerPieces(optimizer, models, binding.trained, pieces)

    @override
    def piece(self, name: str, tensor: Any) -> Piece:
        if isinstance(tensor, jax.Array) and jax.dtypes.issubdtype(tensor.dtype, jax.dtypes.prng_key):
            raise UsageError(f"{name}: give the numbers of a random key, jax.random.key_data(key)")
        return super().piece(name, tensor)


class _OptimizerPieces(checkpoint.OptimizerState):
    """The state of an optimizer that was built for this rank's pieces of the variables.

    Args:
        optimizer: the bound optimizer.
        models: whose variables it updates, by prefix of their paths.
        variables: of the models, as the optimizer has them.
        pieces: of these.
    """

    def __init__(
        self, optimizer: Any, models: Mapping[str, Any], variables: Sequence[Any], pieces: Sequence[LeafPiece]
    ) -> None:
        super().__init__(optimizer, models)
        self._of_models = list(variables)
        named = [self._placement(variable) for variable in self._of_models]
        self._pieces = {placement.name: piece for placement, piece in zip(named, pieces, strict=True)}

    def _variables(self) -> list[Any]:
        return list(self._of_models)

    def _place(self, placement: Placement, slot: str, value: Any) -> tuple[TensorInfo, Part] | None:
        place = ParameterPlace(placement, self._pieces[placement.name])
        return place.of(tuple(value.shape), checkpoint.dtype_of(value), slot)


@calling("ud.save()")
def save(
    path: str | os.PathLike[str],
    model: Any = None,
    optimizer: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
    step: int | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
    on_error: OnError = "raise",
    rng: bool = False,
) -> SaveHandle:
    """Save a checkpoint that any number of ranks, with any strategy, can load. Collective, with the same arguments.

        ud.save("run", model, optimizer, step=1000, keep=3, extra={"epoch": 7})

    Every rank writes about as much. What was at this path before stays whole until the new checkpoint is complete.
    Saving changes nothing, not even before the first step. Gradients are not saved: save between two updates. It may
    be called within `fit`, by a callback.

    Args:
        path: a folder in a file system that all ranks share: the checkpoint itself, or, with `step`, a series of them.
        model: its weights; built. Or several models by name.
        optimizer: of Keras 3: its variables and learning rate, also of a distributed one; or several by name.
        extra: the script's own: plain values and arrays of JAX, nested in dicts and lists. Rank 0's is saved.
        step: number of this checkpoint in the series; its folder is `path/step-N`.
        keep: remove the oldest of the series when this many are complete; those of later steps than `step` stay.
        asynchronous: return as soon as the state is copied, and write while training goes on. The next `save`, `load`
            or `shutdown` waits for it, and so does `wait()` of what is returned, which also raises its errors.
        on_error: when the disk is full or refuses: "raise" on every rank, or "warn" and go on without this checkpoint.
        rng: save the random number generators of each rank: of the model's layers, Python's and numpy's.

    Returns:
        The save: `done()`, `wait()`, `path`, and `error` where on_error="warn" let it pass.

    Raises:
        CheckpointError: it could not be saved, on this rank or another one.
        UsageError: something cannot be saved, or the ranks ask for different things.
    """
    objects = CheckpointObjects(model, optimizer)
    attach_state(objects.models().values())
    with translated():  # values of a program that has failed
        return save_job(
            KerasStates(),
            path,
            objects,
            extra=extra,
            step=step,
            keep=keep,
            asynchronous=asynchronous,
            on_error=on_error,
            rng=rng,
        )


@calling("ud.load()")
def load(
    path: str | os.PathLike[str],
    model: Any = None,
    optimizer: Any = None,
    *,
    strict: bool = True,
    mapping: MappingLike = None,
    rng: bool = False,
) -> Loaded:
    """Load a checkpoint, saved by any number of ranks, with any strategy, by Keras, PyTorch or JAX. Collective.

    Each rank reads what it needs. Nothing is changed on any rank unless the checkpoint fits on all of them; if damage
    is found only while data are read, part of the model has been overwritten. Call it before or after `distribute`;
    with `zero` after it, if there is an optimizer to load.

    Args:
        path: of a checkpoint, or of a series, whose latest complete one is loaded.
        model: as it was saved, and built; or several by name.
        optimizer: of Keras 3: its variables and its learning rate are replaced, unless that is a schedule; or several
            by name. It is built if need be. Other options are not taken from the checkpoint.
        strict: tensors that only one of checkpoint and model has are an error; else what both have is loaded, with a
            warning.
        mapping: names of the checkpoint for those of the model where they differ, with the order of dims: a dict, or a
            YAML or JSON file; see docs/checkpoints.md.
        rng: set the random number generators of each rank to what it saved; a rank that was not there keeps its own,
            and so do layers whose seeds were saved on another backend.

    Returns:
        `extra` as it was saved, `step`, the folder as `path`, and `facts` of the job that saved it.

    Raises:
        CheckpointError: there is none, it is incomplete, damaged, of another format version, or does not fit.
        UsageError: the ranks ask for different things.
    """
    objects = CheckpointObjects(model, optimizer)
    attach_state(objects.models().values())
    return load_job(KerasStates(), path, objects, strict=strict, mapping=mapping, rng=rng)


@calling("ud.redistribute()")
def redistribute(model: Any, to: Any, *, strict: bool = True) -> dict[str, Array] | None:
    """Give the weights of a model to another one, or to some ranks, without a disk. Collective.

        ud.redistribute(model, to=evaluated)            # another model, divided in another way or not at all
        weights = ud.redistribute(model, to=[0])        # all weights on rank 0, by path; None elsewhere

    The numbers are those that `save` and `load` of a checkpoint give. What a rank has itself stays there, and each rank
    gets what it lacks from a rank that has it, some 64 MiB at a time. The model that gives is not changed. Nothing is
    changed on any rank unless the models fit on all of them.

    Args:
        model: built, and trained with any strategy. None on a rank that has no part in it.
        to: the built model that takes the weights, distributed or not; None on a rank that takes none. Or the ranks
            that get all weights, the same on every rank: a list of ranks, or a process set.
        strict: weights that only one of the models has are an error; else what both have is taken, with a warning.

    Returns:
        On ranks that get all weights, numpy arrays by path. Else None.

    Raises:
        CheckpointError: paths, shapes or types do not fit, on this or another rank; names the weights.
        UsageError: neither a model nor ranks, or the ranks ask for different things.
    """
    attach_state(each for each in (model, to) if each is not None and ranks_of(each) is None)
    with translated():  # values of a program that has failed
        return checkpoint.whole_weights(redistribute_job(KerasStates(), model, to, strict=strict))


def attach_state(models: Iterable[Any]) -> None:
    """Wait for the steps that were called, and let variables have their results: `fit` keeps them to itself.

    Raises:
        UnidistError: a step has failed.
    """
    raise_failure(wait=True)
    for model in models:
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()
