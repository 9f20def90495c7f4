"""The processes of a job as one system of JAX: what `jax.distributed` needs, and the mesh with a device of each."""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
import weakref
from contextlib import closing

import jax
import numpy as np
from jax.sharding import Mesh

from unidist.communicator import format_ranks
from unidist.errors import ConfigurationError
from unidist.negotiation import allgather_object, broadcast_object
from unidist.runtime import context
from unidist.settings import read_placement
from unidist_jax.jax_state import has_devices
from unidist_jax.plugin import XLA

AXIS = "unidist_ranks"
"""The axis of the mesh. A function of `spmd` is one rank's along it."""

_SHUTDOWN_SEC = 10
"""How long a process that ends waits for the others; JAX's default of 5 minutes would keep a failed job alive."""


_log = logging.getLogger("unidist")

_on_gpus: weakref.WeakSet[context.Context] = weakref.WeakSet()
"""Runtimes whose ranks compute on GPUs, where nothing else moves arrays within programs."""


def is_chosen() -> bool:
    """Return whether XLA exchanges the arrays of this job's programs. Within an initialized runtime."""
    runtime = context.current()
    return runtime.settings.engine == XLA or runtime in _on_gpus


def way_to_another_engine() -> str:
    """Return what a user does to train with another engine than `xla`, as the end of a sentence."""
    if context.current().settings.engine == XLA:
        return "leave --engine out"
    return "train on CPUs with JAX_PLATFORMS=cpu, as on GPUs XLA alone exchanges arrays of JAX"


def join_processes_on_gpus(runtime: context.Context) -> None:
    """Let the processes of a job that computes on GPUs be one system of JAX, as engine `xla` does. Collective.

    Where JAX has devices already, it is too late: rank 0 says so, and programs of JAX cannot exchange arrays.

    Args:
        runtime: of a job that has named no engine.
    """
    if not jax.distributed.is_initialized() and _have_devices(runtime):
        if runtime.topology.rank == 0:
            _log.warning(
                "JAX has computed before ud.init(), so XLA cannot exchange arrays between the GPUs of this job: call "
                "ud.init() first. TrainStep, ud.spmd and operations within jax.jit will raise an error"
            )
        return
    join_processes(runtime)
    _on_gpus.add(runtime)


def join_processes(runtime: context.Context) -> None:
    """Let the processes of a job be one system of JAX, if they are not yet. Collective, before JAX has a device.

    Raises:
        ConfigurationError: JAX has devices already, or `jax.distributed` was initialized with other processes.
    """
    rank, size = runtime.topology.rank, runtime.topology.world_size
    if size == 1:
        return
    runtime.when_stuck(_end_process)
    if jax.distributed.is_initialized():
        if (jax.process_count(), jax.process_index()) != (size, rank):
            raise ConfigurationError(
                f"engine xla: rank {rank} of {size} is process {jax.process_index()} of {jax.process_count()} in "
                "jax.distributed. Number the processes by their ranks, or leave jax.distributed.initialize() to "
                "ud.init()"
            )
        return
    if ranks := _have_devices(runtime):
        raise ConfigurationError(
            f"engine xla: rank(s) {format_ranks(ranks)} have computed with JAX already: call ud.init() before that"
        )
    address = None
    if rank == 0:
        meeting_place = read_placement().meeting_place
        host = "127.0.0.1" if meeting_place is None or runtime.topology.single_host else meeting_place.host_address
        address = f"{host}:{_free_port(host)}"
    jax.distributed.initialize(
        broadcast_object(runtime.operations(), address, root=0, name="address of jax.distributed"),
        size,
        rank,
        initialization_timeout=int(runtime.settings.start_timeout.total_seconds()),
        shutdown_timeout_seconds=_SHUTDOWN_SEC,
    )


def _end_process(reason: str) -> None:
    """End this process: a collective of XLA on CPUs may wait for a rank that is gone for ever, and is not ended."""
    print(f"unidist: {reason}. This process ends.", file=sys.stderr, flush=True)
    os._exit(1)


def _have_devices(runtime: context.Context) -> list[int]:
    """Return the ranks on which JAX has devices already. Collective."""
    found = allgather_object(runtime.operations(), has_devices(), name="devices before jax.distributed")
    return [rank for rank, has in enumerate(found) if has]


def rank_mesh() -> Mesh:
    """Return a mesh with one device of each rank, in rank order.

    Raises:
        ConfigurationError: the engine of this job is another one, or ranks have several devices.
    """
    if not is_chosen():
        raise ConfigurationError(
            f"ud.spmd needs engine 'xla', and this job has {context.current().settings.engine!r}: unidist launch "
            "--engine xla, or UNIDIST_ENGINE=xla. With other engines the operations work within jax.jit"
        )
    return _mesh(context.current().topology.world_size)


@functools.cache
def _mesh(size: int) -> Mesh:
    if jax.process_count() != size:
        raise ConfigurationError(
            f"engine xla: the {size} ranks of this job are not the processes of jax.distributed, which has "
            f"{jax.process_count()}: call ud.init() before anything computes with JAX; the log says what failed there"
        )
    devices = jax.devices()
    owners = [device.process_index for device in devices]
    if sorted(owners) != list(range(size)):
        raise ConfigurationError(
            f"engine xla: the {size} ranks of this job have {len(devices)} devices, of the processes {owners}. Each "
            "rank has one: start a rank for each device, and show it to that rank alone (JAX_LOCAL_DEVICE_IDS)"
        )
    return Mesh(np.array(sorted(devices, key=lambda device: device.process_index)), (AXIS,))


def _free_port(host: str) -> int:
    with closing(socket.socket()) as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port
