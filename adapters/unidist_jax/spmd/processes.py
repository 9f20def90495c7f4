"""The processes of a job as one system of JAX: what `jax.distributed` needs, and the mesh with a device of each."""

from __future__ import annotations

import functools
import socket
from contextlib import closing
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from unidist.runtime.context import Context

AXIS = "unidist_ranks"
"""The axis of the mesh. A function of `spmd` is one rank's along it."""

_SHUTDOWN_SEC = 10
"""How long a process that ends waits for the others; JAX's default of 5 minutes would keep a failed job alive."""


def is_chosen() -> bool:
    """Return whether this job's engine is `xla`. Within an initialized runtime."""
    return context.current().settings.engine == XLA


def join_processes(runtime: Context) -> None:
    """Let the processes of a job be one system of JAX, if they are not yet. Collective, before JAX has a device.

    Raises:
        ConfigurationError: JAX has devices already, or `jax.distributed` was initialized with other processes.
    """
    rank, size = runtime.topology.rank, runtime.topology.world_size
    if size == 1:
        return
    if jax.distributed.is_initialized():
        if (jax.process_count(), jax.process_index()) != (size, rank):
            raise ConfigurationError(
                f"engine xla: rank {rank} of {size} is process {jax.process_index()} of {jax.process_count()} in "
                "jax.distributed. Number the processes by their ranks, or leave jax.distributed.initialize() to "
                "ud.init()"
            )
        return
    too_late = allgather_object(runtime.operations(), has_devices(), name="devices before jax.distributed")
    if any(too_late):
        ranks = [number for number, each in enumerate(too_late) if each]
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
