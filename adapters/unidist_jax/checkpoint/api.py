"""Checkpoints of JAX training: `save`, `load` and `redistribute`. What is in a checkpoint: docs/checkpoints.md."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unidist.checkpoint.job import CheckpointObjects, MappingLike, load_job, save_job
from unidist.checkpoint.loading import Loaded as LoadedPlain
from unidist.checkpoint.redistribution import ranks_of, redistribute_job
from unidist.checkpoint.save_request import OnError, SaveHandle
from unidist.errors import UsageError
from unidist.runtime import context
from unidist.waits import calling
from unidist_arrays.memory import array_of_buffer
from unidist_jax.checkpoint.states import (
    JaxStates,
    KeptOptimizer,
    KeptParameters,
    TakenParameters,
    Training,
    kept_training,
)
from unidist_jax.compiled import flush, translated
from unidist_jax.memory import jax_array
from unidist_jax.optimizer import BoundOptimizer

__all__ = ["Loaded", "SaveHandle", "load", "redistribute", "save"]


@dataclass(frozen=True)
class Loaded(LoadedPlain):
    """The result of a load.

    Attributes:
        params: the tree of parameters; of a `TrainStep` what this rank holds of it. None if none was given.
        opt_state: the optimizer state, likewise.
        path: the folder of the checkpoint.
        step: its number in its series, or None.
        extra: what was given to `save` as `extra`; `{}` if nothing was.
        facts: about the job that saved it, from the index.
    """

    params: Any
    opt_state: Any


@calling("ud.save()")
def save(
    path: str | os.PathLike[str],
    params: Any = None,
    opt_state: Any = None,
    *,
    optimizer: BoundOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    step: int | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
    on_error: OnError = "raise",
    rng: bool = False,
) -> SaveHandle:
    """Save a checkpoint that any number of ranks, with any strategy, can load. Collective, with the same arguments.

        ud.save("run", params, opt_state, step=1000, keep=3, extra={"epoch": 7})
        ud.save("run", train_step)                                # its parameters and optimizer state
        ud.save("run", params, opt_state, optimizer=optimizer)    # with zero, whose ranks have shards of the state

    Every rank writes about as much. What was at this path before stays whole until the new checkpoint is complete.
    Gradients are not saved: save between two updates.

    Args:
        path: a folder in a file system that all ranks share: the checkpoint itself, or, with `step`, a series of them.
        params: a tree with arrays of any type in it; other leaves are left out. Or a `TrainStep`.
        opt_state: of an optimizer of optax over `params`.
        optimizer: the distributed optimizer: where each rank has a shard of the state, and for the number of updates.
        extra: the script's own: plain values and arrays of JAX (`jax.random.key_data(key)`), nested in dicts and lists.
            Rank 0's is saved.
        step: number of this checkpoint in the series; its folder is `path/step-N`.
        keep: remove the oldest of the series when this many are complete; those of later steps than `step` stay.
        asynchronous: return as soon as the state is copied, and write while training goes on. The next `save`, `load`
            or `shutdown` waits for it, and so does `wait()` of what is returned, which also raises its errors.
        on_error: when the disk is full or refuses: "raise" on every rank, or "warn" and go on without this checkpoint.
        rng: save the random number generators of Python and numpy, of each rank. JAX has none: put keys into `extra`.

    Returns:
        The save: `done()`, `wait()`, `path`, and `error` where on_error="warn" let it pass.

    Raises:
        CheckpointError: it could not be saved, on this rank or another one.
        UsageError: something cannot be saved, or the ranks ask for different things.
    """
    if optimizer is None and not isinstance(params, Training):
        _check_ranks_are_equal("save(path, params)", "save(path, params, opt_state, optimizer=optimizer)")
    objects, _, _ = _objects(params, opt_state, optimizer)
    flush()  # programs that were called are still counting updates
    with translated():  # arrays of a program that has failed
        return save_job(
            JaxStates(),
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
    params: Any = None,
    opt_state: Any = None,
    *,
    optimizer: BoundOptimizer | None = None,
    strict: bool = True,
    mapping: MappingLike = None,
    rng: bool = False,
) -> Loaded:
    """Load a checkpoint, saved by any number of ranks, with any strategy, by JAX, PyTorch or Keras. Collective.

        loaded = ud.load("run", params, opt_state)
        params, opt_state, epoch = loaded.params, loaded.opt_state, loaded.extra["epoch"]
        ud.load("run", train_step)                                # sets its params and opt_state

    Arrays of JAX do not change: use the trees that it returns. Each rank reads what it needs.

    Args:
        path: of a checkpoint, or of a series, whose latest complete one is loaded.
        params: a tree like that to load, with arrays or `jax.ShapeDtypeStruct`s. Or a `TrainStep`.
        opt_state: as `optimizer.init(params)` returns it, likewise. What the checkpoint does not have of it stays. From
            an optimizer of PyTorch or Keras come moments and the count, and the learning rate for
            `optax.inject_hyperparams`.
        optimizer: see `save`.
        strict: tensors that only one of checkpoint and trees has are an error; else what both have is loaded, with a
            warning.
        mapping: names of the checkpoint for the paths of `params` where they differ, with the order of dims: a dict, or
            a YAML or JSON file; see docs/checkpoints.md.
        rng: set the generators of Python and numpy of each rank to what it saved; a rank that was not there keeps its
            own.

    Returns:
        `params` and `opt_state`, `extra` as it was saved, `step`, the folder as `path`, and `facts` of the job that
        saved it.

    Raises:
        CheckpointError: there is none, it is incomplete, damaged, of another format version, or does not fit.
        UsageError: the ranks ask for different things.
    """
    objects, parameters, state = _objects(params, opt_state, optimizer)
    flush()
    found = load_job(JaxStates(), path, objects, strict=strict, mapping=mapping, rng=rng)
    return Loaded(
        found.path,
        found.step,
        found.extra,
        found.facts,
        params=None if parameters is None or parameters.state is None else parameters.state.loaded,
        opt_state=None if state is None or state.state is None else state.state.loaded,
    )


@calling("ud.redistribute()")
def redistribute(params: Any, to: Any, *, strict: bool = True) -> Any:
    """Give the values of a tree to another one, or to some ranks, without a disk. Collective.

        evaluated = ud.redistribute(train_step, to=evaluated)    # a tree like that of the whole parameters
        arrays = ud.redistribute(train_step, to=[0])             # all arrays on rank 0, by path; None elsewhere

    The numbers are those that `save` and `load` of a checkpoint give. What a rank has itself stays there, and each rank
    gets what it lacks from a rank that has it, some 64 MiB at a time. Arrays of JAX do not change: use the tree that it
    returns. An error of one rank is raised on all of them, before anything was exchanged if the trees do not fit.

    Args:
        params: the tree that has the values, or a `TrainStep`. None on a rank that has no part in it.
        to: a tree of arrays like that to return, or a `TrainStep` that takes the values; None on a rank that takes
            none. Or the ranks that get all arrays, the same on every rank: a list of ranks, or a process set.
        strict: arrays that only one of the trees has are an error; else what both have is taken, with a warning.

    Returns:
        The tree with the values; of a `TrainStep` what this rank holds. On ranks that get all arrays, these by path.
        Else None.

    Raises:
        CheckpointError: paths, shapes or types do not fit, on this or another rank; names the arrays.
        UsageError: neither trees nor ranks, or the ranks ask for different things.
    """
    if params is not None and not isinstance(params, Training):
        _check_ranks_are_equal("redistribute(params)", "train with a TrainStep, and give that")
    flush()  # programs that were called may still be computing
    taken = None if to is None or ranks_of(to) is not None else TakenParameters(to)
    with translated():  # arrays of a program that has failed
        given = None if params is None else TakenParameters(params)
        found = redistribute_job(JaxStates(), given, to if taken is None else taken, strict=strict)
    if found is not None:
        return {name: jax_array(array_of_buffer(memory, info.shape)) for name, (info, memory) in found[0].items()}
    return None if taken is None else taken.tree


def _check_ranks_are_equal(call: str, instead: str) -> None:
    """Raise UsageError if a strategy of the command line lets ranks differ, and only the optimizer knows whether."""
    differing = [strategy.name for strategy in context.current().plan.strategies if not strategy.keeps_replicas]
    if differing:
        raise UsageError(
            f"{call}: under {' and '.join(map(repr, differing))} the ranks' parameters may differ, "
            f"and only the optimizer knows: {instead}"
        )


def _objects(
    params: Any, opt_state: Any, optimizer: BoundOptimizer | None
) -> tuple[CheckpointObjects, KeptParameters | None, KeptOptimizer | None]:
    """Return what is saved or loaded, and its two parts."""
    if isinstance(params, Training):
        if opt_state is not None or optimizer is not None:
            raise UsageError("a TrainStep has its optimizer and its state: leave opt_state= and optimizer= out")
        kept = kept_training(params)
        return CheckpointObjects(*kept), *kept
    if params is None and (opt_state is not None or optimizer is not None):
        raise UsageError("the paths of an optimizer's state are those of the parameters: give the parameters, too")
    if optimizer is not None and opt_state is None:
        raise UsageError("optimizer= without opt_state: the state is what is saved, and the optimizer has none")
    parameters = None if params is None else KeptParameters(params)
    state = None if opt_state is None else KeptOptimizer(params, opt_state, optimizer)
    return CheckpointObjects(parameters, state), parameters, state
