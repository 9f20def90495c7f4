"""Connects the ranks of a group to a store in shared memory."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence

from unidist.buffer import Buffer
from unidist.communicator import Communicator
from unidist.communicator_capabilities import SharesMemory
from unidist.errors import ConfigurationError
from unidist_parameter_server.store.inboxes import Inboxes
from unidist_parameter_server.store.locks import ProcessLocks
from unidist_parameter_server.store.memory import StoreShape
from unidist_parameter_server.store.shared_memory import SharedMemoryStore

_PATH_BYTES = 1024


def check_shares_memory(communicator: Communicator) -> SharesMemory:
    """Return the communicator if its ranks can map the same memory.

    Raises:
        ConfigurationError: on every rank; says why they cannot.
    """
    if not isinstance(communicator, SharesMemory):
        obstacle = f"the engine ({communicator.description}) has none"
    elif obstacle := communicator.sharing_obstacle():
        pass
    else:
        return communicator
    raise ConfigurationError(
        f"parameter_server keeps the parameters in memory that all ranks share: {obstacle}. Use one host and --engine "
        "shm, or --strategy data"
    )


def make_shared_store(
    communicator: Communicator, shape: StoreShape, slots: Sequence[str], *, needed: int, inboxes: Inboxes | None = None
) -> SharedMemoryStore:
    """Return the store of the ranks of a group, which are its workers. Collective.

    Args:
        communicator: over the workers, all on one host.
        shape: equal on every rank.
        slots: names of the optimizer's arrays.
        needed: number of gradients that make a synchronous step.
        inboxes: where gradients are left alone until a synchronous step is applied; None: they are copied to the store.

    Raises:
        ConfigurationError: on every rank: they cannot share memory, or there is too little; says how much is needed.
    """
    shared = check_shares_memory(communicator).allocate_shared(shape.nbytes).shared
    return SharedMemoryStore(
        shape,
        slots,
        shared.bytes(),
        _meet(communicator),
        communicator.rank,
        needed=needed,
        barrier=lambda: communicator.barrier().wait(),
        timeout=communicator.timeout,
        memory_owner=(shared, inboxes),
        inboxes=() if inboxes is None else inboxes.arrays,
    )


def _meet(communicator: Communicator) -> ProcessLocks:
    """Let rank 0 make a file without contents, and all ranks open it; then it is unlinked. Collective."""
    path = bytearray(_PATH_BYTES)
    error = ""
    if communicator.rank == 0:
        try:
            descriptor, name = tempfile.mkstemp(prefix="unidist-locks-")
            os.close(descriptor)
            path[: len(name.encode())] = name.encode()
        except OSError as exc:
            error = f": {exc}"
    communicator.broadcast(Buffer.of(path), root=0).wait()
    text = path.rstrip(b"\0").decode()
    if not text:
        raise ConfigurationError(
            f"parameter_server: rank 0 cannot make a file for locks in {tempfile.gettempdir()}{error}; set TMPDIR to a "
            "folder that it can write to"
        )
    try:
        locks = ProcessLocks(text)
        communicator.barrier().wait()
    finally:
        if communicator.rank == 0:
            with contextlib.suppress(OSError):
                os.unlink(text)
    return locks
