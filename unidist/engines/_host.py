"""The resources that the ranks of one host share: engine memory, and pipes that show when a rank is gone.

Each rank keeps the write end of a pipe open and gives the read end to the others. When the process ends, in whatever
way, the kernel closes the pipe, and every read end reports a hang-up.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import weakref
from datetime import timedelta

from unidist.engines import _shm
from unidist.engines._arena import Allocation, Arena, default_capacity
from unidist.engines._shm_pages import all_unmapped, mapping_bytes
from unidist.errors import ConfigurationError
from unidist.rendezvous import Rendezvous

_GREETING = struct.Struct("!QI")  # capacity, protocol version
_PROTOCOL = 3

SMALL_BYTES = 8192
"""Payloads up to this travel with the descriptor of their operation."""

_MIN_WINDOW_BYTES = 1 << 16
_MIN_SHARE_BYTES = 64 * 16  # of each rank in a window: 64 elements of the widest type


class HostMemory:
    """The mapped engine memory of all ranks of this host. Collective: every rank creates it at the same point.

    Args:
        rank: this process.
        size: number of ranks; all on this host.
        rendezvous: hands the descriptors around.
        capacity: address space per rank; None takes `default_capacity`. May differ between ranks.
        timeout: longest wait for the other ranks.

    Attributes:
        arena: this rank's own memory; gone after `close`: what still refers to a closed runtime shall hold no memory.
        bases: address in this process of every rank's memory.
        capacities: size of every rank's mapping.
        memories: descriptor per rank of the file of its memory.
        liveness: descriptor per rank that hangs up when the rank ends.
    """

    def __init__(
        self, rank: int, size: int, rendezvous: Rendezvous, *, capacity: int | None, timeout: timedelta
    ) -> None:
        self.rank = rank
        self.arena = Arena(capacity or default_capacity(size))
        self.bases: list[int] = []
        self.capacities: list[int] = []
        self.memories: list[int] = []
        self.liveness: list[int] = []
        read_end, self._write_end = os.pipe2(os.O_CLOEXEC)
        _open_hosts.add(self)
        try:
            greeting = _GREETING.pack(self.arena.capacity, _PROTOCOL)
            contributions = rendezvous.allgather(greeting, fds=(self.arena.fd, read_end), timeout=timeout)
            for other, item in enumerate(contributions):
                self._admit(other, item.payload, item.fds)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(read_end)

    def _admit(self, other: int, payload: bytes, fds: tuple[int, ...]) -> None:
        memory, pipe = fds
        self.memories.append(memory)
        self.liveness.append(pipe)
        capacity, protocol = _GREETING.unpack(payload)
        try:
            if protocol != _PROTOCOL:
                raise ConfigurationError(
                    f"rank {other} runs another version of unidist's shm engine; install one version"
                )
            self.bases.append(self.arena.address if other == self.rank else _shm.map(memory, capacity))
        except OSError as exc:
            raise ConfigurationError(
                f"shm: rank {self.rank} cannot map {capacity} bytes of address space of rank {other}: {exc}. "
                "Set UNIDIST_SHM_CAPACITY_BYTES to what this process may use."
            ) from exc
        self.capacities.append(capacity)

    def close(self) -> None:
        """Unmap the other ranks' memory and show them that this rank has left. Own allocations stay valid."""
        _open_hosts.discard(self)
        for other, (base, capacity) in enumerate(zip(self.bases, self.capacities, strict=False)):
            if other != self.rank:
                _shm.unmap(base, capacity)
        for descriptor in (*self.memories, *self.liveness, self._write_end):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.bases, self.capacities, self.memories, self.liveness, self._write_end = [], [], [], [], -1
        if hasattr(self, "arena"):
            del self.arena


class SharedHost:
    """The host's memory, closed when the last communicator on it is.

    A slot is given back only after every member has closed the group: until then they look at it.
    """

    def __init__(self, host: HostMemory, staging_bytes: int) -> None:
        self.host = host
        self._staging_bytes = staging_bytes
        # Any thread may make and close communicators; the collector closes some in the middle of a method here.
        self._lock = threading.RLock()
        self._users = 0
        self._retired: list[tuple[_shm.Group, Allocation]] = []
        self._shared: list[tuple[Allocation, int]] = []  # what this rank's groups share, and with how many ranks

    def window_bytes(self, size: int) -> int:
        """Return the size of one of the two staging windows of a slot."""
        return -(-max(self._staging_bytes // 2, _MIN_WINDOW_BYTES, _MIN_SHARE_BYTES * size) // 4096) * 4096

    def allocate_slot(self, size: int) -> Allocation:
        """Return memory for this rank's slot in a group of `size`."""
        with self._lock:
            for retired in [each for each in self._retired if each[0].all_closed()]:
                self._retired.remove(retired)
                _visible_to_peers.discard(retired[1])
        return self.host.arena.allocate(_shm.slot_bytes(size, SMALL_BYTES, self.window_bytes(size)))

    def allocate(self, nbytes: int) -> Allocation:
        """Return engine memory of this rank."""
        self._free_unmapped()
        return self.host.arena.allocate(nbytes)

    def allocate_shared(self, nbytes: int, size: int) -> Allocation:
        """Return memory for `SharedPages` of a group of `size` ranks. It is kept until all of them have unmapped it."""
        allocation = self.allocate(mapping_bytes(nbytes))
        with self._lock:
            _visible_to_peers.add(allocation)
            self._shared.append((allocation, size))
        return allocation

    def free_shared(self, allocation: Allocation) -> None:
        """Free what `allocate_shared` returned, before any rank has mapped it."""
        with self._lock:
            _visible_to_peers.discard(allocation)
            self._shared[:] = [each for each in self._shared if each[0] is not allocation]

    def _free_unmapped(self) -> None:
        with self._lock:
            for each in [each for each in self._shared if all_unmapped(*each)]:
                self._shared.remove(each)
                _visible_to_peers.discard(each[0])

    def acquire(self, slot: Allocation) -> None:
        """Count one communicator more, and keep its slot."""
        with self._lock:
            self._users += 1
            _visible_to_peers.add(slot)
            _in_use.add(self.host.arena)

    def release(self, group: _shm.Group, slot: Allocation) -> None:
        """Count one communicator less."""
        with self._lock:
            self._users -= 1
            self._retired.append((group, slot))
            if self._users == 0:
                self._end()

    def _end(self) -> None:
        for _, retired in self._retired:
            retired.abandon()
            _visible_to_peers.discard(retired)
        self._retired.clear()
        self._free_unmapped()
        for allocation, _ in self._shared:
            allocation.abandon()  # it ends with the last rank's mapping of it
            _visible_to_peers.discard(allocation)
        self._shared.clear()
        _in_use.discard(self.host.arena)
        self.host.close()


# Arenas that groups look at. A group that nobody closes does so when it is collected, with everything that only it
# refers to, and the collector finalizes that in any order: neither the arena must be among it, nor what peers look at,
# which would be given back, and so be zero, before this rank has left.
_in_use: set[Arena] = set()
_visible_to_peers: set[Allocation] = set()

# A forked child (a DataLoader worker) would keep the pipe open and make a dead rank look alive.
_open_hosts: weakref.WeakSet[HostMemory] = weakref.WeakSet()


def _close_pipes_in_child() -> None:
    for host in list(_open_hosts):
        if host._write_end >= 0:
            os.close(host._write_end)
            host._write_end = -1


os.register_at_fork(after_in_child=_close_pipes_in_child)
