"""Lifecycle, topology, process sets and timeline by Horovod's names, the same in every facade."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unidist.communicator import Communicator
from unidist.errors import ConfigurationError
from unidist.horovod_api.world_size import WorldSize
from unidist.negotiation.process_sets import ProcessSet
from unidist.runtime import context
from unidist.settings.environment import ROLE_VARIABLE


def init(comm: Any = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Start unidist in this process; every rank calls it once. Called again, it does nothing.

    Under `unidist launch`, torchrun, horovodrun, mpirun or srun it finds its place in their variables; without any
    of them this process is the only rank.

    Args:
        comm: for Horovod's sake: all ranks, as a list or as an mpi4py communicator. For fewer use process sets.
        process_sets: sets to register at once, the same on every rank. Horovod's "dynamic" is always on.

    Raises:
        ConfigurationError: environment, strategies or engine do not fit; or `comm` is not all ranks.
        StalledError: a rank did not come; names it.
    """
    if context.is_initialized():
        return
    runtime = context.init()
    size = runtime.topology.world_size
    named = size if comm is None else _count_ranks(comm, size)
    if named != size:
        shutdown()
        raise ConfigurationError(
            f"init(comm=...) names {named} of the {size} ranks of this job. Start the job with the ranks that take "
            "part, or call init() and use process sets."
        )
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            runtime.process_sets.add(process_set)


def _count_ranks(comm: Any, size: int) -> int:
    """Return how many of the ranks an mpi4py communicator or a list names."""
    return int(comm.Get_size()) if hasattr(comm, "Get_size") else len(set(comm) & set(range(size)))


def shutdown() -> None:
    """End unidist in this process. `init()` may be called again. Without `init()` it does nothing."""
    context.shutdown()


def is_initialized() -> bool:
    """Return whether `init()` was called, and `shutdown()` not since."""
    return context.is_initialized()


def rank() -> int:
    """Return the rank of this process, from 0."""
    return context.current().topology.rank


def size() -> int:
    """Return the number of processes. Samples are divided over `data_size()` of them, which can be fewer."""
    return WorldSize.of(context.current())


def data_rank() -> int:
    """Return which share of the samples is this process's, from 0, below `data_size()`.

    Ranks that hold parts of one model (along the axes `pipeline` and `tensor`) have the same share. With a strategy in
    the script (`strategy=`), not on the command line, call it after the model is distributed.
    """
    return context.current().data_place()[0]


def data_size() -> int:
    """Return the number of shares into which samples are divided: `size()`, unless strategies divide the model.

    A batch of one update has `data_size()` times as many samples as that of a rank.
    """
    return context.current().data_place()[1]


def report(*, samples: int = 0, **values: Any) -> None:
    """Tell the launcher how training goes, for its status line and its page (`unidist launch --status-port`).

        ud.report(loss=loss, samples=len(x))

    Local and cheap: a few times a second the last values are written to memory that the launcher reads. Without
    `unidist launch` nothing happens. `TrainStep` reports its loss and samples itself. Steps are the updates of
    distributed optimizers, and need no call.

    Args:
        samples: that this rank has trained on since its last call. Those of ranks that hold parts of one model count
            once, and so do those that a `TrainStep` counts itself.
        **values: numbers, or tensors of one element, by names of your choice. They are shown as means over the ranks
            that report them.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: a value is not one number, or there are more than 16 names.
    """
    context.current().progress.report(values, samples)


def role() -> str:
    """Return what this process does in its job, in the words of `TF_CONFIG`.

    Returns:
        "chief": rank 0; "worker": another rank. In a process beside the ranks what it does: "ps" (a parameter server),
        "evaluator", or a word of a plugin; without `init()` there.
    """
    return os.environ.get(ROLE_VARIABLE) or ("chief" if rank() == 0 else "worker")


def local_rank() -> int:
    """Return the rank of this process among those of its host."""
    return context.current().topology.local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return context.current().topology.local_size


def cross_rank() -> int:
    """Return the index of this host."""
    return context.current().topology.node_rank


def cross_size() -> int:
    """Return the number of hosts."""
    return context.current().topology.num_nodes


def is_homogeneous() -> bool:
    """Return whether every host has as many ranks as this one."""
    topology = context.current().topology
    return topology.world_size == topology.local_size * topology.num_nodes


def world() -> Communicator:
    """Return the communicator over all ranks: ordered, unnamed operations on buffers, with the least overhead.

    Every rank issues the same operations on it in the same order. `buffer(tensor)` makes its arguments.
    """
    return context.current().world


# Process sets


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set of ranks and return it. Every rank calls it with the same ranks, those outside of the set too.

    Raises:
        ValueError: a set of these ranks is registered already, or there is no such rank.
        MismatchError: the ranks gave different sets.
    """
    return context.current().process_sets.add(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a set out of use; every rank calls it. Returns whether it was registered; the global set stays."""
    return context.current().process_sets.remove(process_set)


# Timeline


def start_timeline(file_path: str, mark_cycles: bool = False, *, per_tensor: bool | None = None) -> None:
    """Record a Chrome trace from now on.

    Args:
        file_path: "%r" in it becomes the rank; without, rank 0 writes the file and the others none.
        mark_cycles: record the cycles of negotiation too.
        per_tensor: a row for each tensor, as Horovod has it, instead of one for each phase of a step. None: as the
            option `--timeline-per-tensor` says.

    Raises:
        UsageError: a timeline is being recorded already.
        ConfigurationError: the file cannot be written.
    """
    runtime = context.current()
    if per_tensor is None:
        per_tensor = runtime.settings.timeline_per_tensor
    runtime.recorder.start(Path(file_path), rank=runtime.topology.rank, mark_cycles=mark_cycles, per_tensor=per_tensor)


def stop_timeline() -> None:
    """End the recording and complete the file. Without a recording it does nothing."""
    context.current().recorder.stop()


# What is there. They answer for unidist's engines of these names.


def mpi_built() -> bool:
    """Return whether the engine `mpi` can be used."""
    return context.engine_usable("mpi")


def mpi_enabled() -> bool:
    """Return whether this job runs over MPI."""
    return context.current().engine.spec.name == "mpi"


def mpi_threads_supported() -> bool:
    """Return whether MPI was started for several threads.

    Raises:
        ValueError: this job does not run over MPI.
    """
    if not mpi_enabled():
        raise ValueError(f"this job runs over the engine {context.current().engine.spec.name!r}, not over MPI")
    return True  # the engine starts MPI so, or not at all


def gloo_built() -> bool:
    """Return whether the engine `gloo` can be used."""
    return context.engine_usable("gloo")


def gloo_enabled() -> bool:
    """Return whether this job runs over the engine `gloo`."""
    return context.current().engine.spec.name == "gloo"


def ddl_built() -> bool:
    """Return False: no engine uses IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Return False: no engine uses Intel's oneCCL."""
    return False
