"""Checkpoints of PyTorch training: `save`, `load` and `redistribute`. What is in a checkpoint: docs/checkpoints.md."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import torch

from unidist.checkpoint.job import CheckpointObjects, MappingLike, load_job, save_job
from unidist.checkpoint.loading import Loaded
from unidist.checkpoint.redistribution import redistribute_job
from unidist.checkpoint.save_request import OnError, SaveHandle
from unidist.negotiation.process_sets import ProcessSet
from unidist.waits import calling
from unidist_torch.checkpoint.states import TorchStates
from unidist_torch.memory import tensor_of

__all__ = ["Loaded", "SaveHandle", "load", "redistribute", "save"]

Models = torch.nn.Module | Mapping[str, torch.nn.Module] | None
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None


@calling("ud.save()")
def save(
    path: str | os.PathLike[str],
    model: Models = None,
    optimizer: Optimizers = None,
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
    Saving changes nothing, not even before the first step. Gradients are not saved: save between two updates.

    Args:
        path: a folder in a file system that all ranks share: the checkpoint itself, or, with `step`, a series of them.
        model: its parameters and persistent buffers; or several models by name.
        optimizer: its state and options, also of a distributed one; or several by name.
        extra: the script's own: plain values and tensors, nested in dicts and lists. Rank 0's is saved.
        step: number of this checkpoint in the series; its folder is `path/step-N`.
        keep: remove the oldest of the series when this many are complete; those of later steps than `step` stay.
        asynchronous: return as soon as the state is copied, and write while training goes on. The next `save`, `load`
            or `shutdown` waits for it, and so does `wait()` of what is returned, which also raises its errors.
        on_error: when the disk is full or refuses: "raise" on every rank, or "warn" and go on without this checkpoint.
        rng: save the random number generators of torch, Python and numpy, of each rank.

    Returns:
        The save: `done()`, `wait()`, `path`, and `error` where on_error="warn" let it pass.

    Raises:
        CheckpointError: it could not be saved, on this rank or another one.
        UsageError: something cannot be saved, or the ranks ask for different things.
    """
    return save_job(
        TorchStates(),
        path,
        CheckpointObjects(model, optimizer),
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
    model: Models = None,
    optimizer: Optimizers = None,
    *,
    strict: bool = True,
    mapping: MappingLike = None,
    rng: bool = False,
) -> Loaded:
    """Load a checkpoint, saved by any number of ranks, with any strategy, by PyTorch or Keras. Collective.

    Each rank reads what it needs. Nothing is changed on any rank unless the checkpoint fits on all of them; if damage
    is found only while data are read, part of the model has been overwritten. Call it before or after `distribute`.

    Args:
        path: of a checkpoint, or of a series, whose latest complete one is loaded.
        model: as it was saved; or several by name. On the device that it shall be on.
        optimizer: its state and options are replaced; or several by name. Options of a Keras optimizer are not taken,
            but for the learning rate.
        strict: tensors that only one of checkpoint and model has are an error; else what both have is loaded, with a
            warning.
        mapping: names of the checkpoint for those of the model where they differ, with the order of dims: a dict, or a
            YAML or JSON file; see docs/checkpoints.md.
        rng: set the random number generators of each rank to what it saved; a rank that was not there keeps its own.

    Returns:
        `extra` as it was saved, `step`, the folder as `path`, and `facts` of the job that saved it.

    Raises:
        CheckpointError: there is none, it is incomplete, damaged, of another format version, or does not fit.
        UsageError: the ranks ask for different things.
    """
    return load_job(TorchStates(), path, CheckpointObjects(model, optimizer), strict=strict, mapping=mapping, rng=rng)


@calling("ud.redistribute()")
def redistribute(
    model: torch.nn.Module | None,
    to: torch.nn.Module | Collection[int] | ProcessSet | None,
    *,
    strict: bool = True,
) -> dict[str, Any] | None:
    """Give the values of a model to another one, or to some ranks, without a disk. Collective.

        ud.redistribute(model, to=evaluated)            # another model, divided in another way or not at all
        weights = ud.redistribute(model, to=[0])        # the whole model on rank 0, as a state dict; None elsewhere

    The numbers are those that `save` and `load` of a checkpoint give. What a rank has itself stays there, and each rank
    gets what it lacks from a rank that has it, some 64 MiB at a time. The model that gives is not changed. Nothing is
    changed on any rank unless the models fit on all of them.

    Args:
        model: trained with any strategy; its parameters and persistent buffers are given. None on a rank that has no
            part in it.
        to: the model that takes the values, distributed or not; None on a rank that takes none. Or the ranks that get
            the whole model, the same on every rank: a list of ranks, or a process set.
        strict: tensors that only one of the models has are an error; else what both have is taken, with a warning.

    Returns:
        On ranks that get the whole model, a state dict in new host memory. Else None.

    Raises:
        CheckpointError: names, shapes or types do not fit, on this or another rank; names the tensors.
        UsageError: neither a model nor ranks, or the ranks ask for different things.
    """
    found = redistribute_job(TorchStates(), model, to, strict=strict)
    if found is None:
        return None
    tensors, values = found
    state: dict[str, Any] = {name: tensor_of(memory, info.shape) for name, (info, memory) in tensors.items()}
    return state | values.get("extra_state", {})
