"""Engine memory: one anonymous file per rank, mapped by every rank of the host.

The file (memfd) has no name and ends with its last user, so nothing can be left behind, and /dev/shm's size
does not matter. It is as large as the machine's memory but holds no page that was not allocated, so
one mapping made at the start serves all later allocations.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import resource
import threading
import weakref
from collections import deque
from pathlib import Path

from unidist.buffer import Buffer, DType
from unidist.errors import ConfigurationError

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MAX_ADDRESS_SPACE = 1 << 45
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_MANY = 4  # living arenas of one process, from which on a new one is preceded by a collection of garbage

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def default_capacity(num_ranks: int) -> int:
    """Return the address space to reserve per rank: the machine's memory, less where limits demand it."""
    capacity = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    capacity = min(capacity, _MAX_ADDRESS_SPACE // num_ranks)
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        capacity = min(capacity, address_space // (2 * num_ranks))
    file_size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if file_size != resource.RLIM_INFINITY:
        capacity = min(capacity, file_size)
    return capacity // _PAGE * _PAGE


class Allocation:
    """A piece of an arena, released with the last reference to it."""

    __slots__ = ("_abandoned", "_arena", "nbytes", "offset")

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        self._arena = arena
        self._abandoned = False
        self.offset = offset
        self.nbytes = nbytes

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""
        return self._arena.address + self.offset

    def buffer(self, nbytes: int | None = None) -> Buffer:
        """Return the first `nbytes` bytes as a buffer that keeps this allocation."""
        return Buffer(self.address, self.nbytes if nbytes is None else nbytes, DType.UINT8, self)

    def abandon(self) -> None:
        """Keep the memory until the arena ends: peers may still read it after this rank has ended."""
        self._abandoned = True

    def __del__(self) -> None:
        if not self._abandoned:
            self._arena.free(self.offset, self.nbytes)


class Arena:
    """This rank's own engine memory.

    Args:
        capacity: bytes of address space; allocations together cannot exceed it.

    Raises:
        ConfigurationError: the system refuses the file or the mapping; says how much was asked for.
    """

    def __init__(self, capacity: int) -> None:
        from unidist.engines import _shm

        _collect_garbage_if_many()
        self.capacity = capacity
        self._pid = os.getpid()
        self._unmap = _shm.unmap
        self.address = 0
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, capacity)]  # offset, bytes; by offset, never adjacent
        self._returned: deque[tuple[int, int]] = deque()  # not in `_free` yet
        self.fd = os.memfd_create("unidist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, capacity)
            # Nobody may shrink the file under a peer's feet: touching the lost pages would kill it.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.address = _shm.map(self.fd, capacity)
        except OSError as exc:
            os.close(self.fd)
            self.fd = -1
            raise ConfigurationError(
                f"shm: cannot reserve {capacity} bytes of address space for engine memory: {exc}. "
                "Set UNIDIST_SHM_CAPACITY_BYTES to what this process may use."
            ) from exc
        _living.add(self)

    def allocate(self, nbytes: int) -> Allocation:
        """Return zeroed memory, really there (not only promised), aligned to pages.

        Raises:
            ConfigurationError: too little memory; says how much is needed and how much there is.
        """
        size = max(_PAGE, (nbytes + _PAGE - 1) // _PAGE * _PAGE)
        available = available_memory()
        if size > available:
            gc.collect()  # engine memory in reference cycles, see `__init__`
            available = available_memory()
        if size > available:
            raise ConfigurationError(
                f"shm: engine memory of {nbytes} bytes was asked for, but only {available} bytes of memory are "
                "available on this host. Use fewer ranks per host, smaller buckets, or a machine with more memory."
            )
        with self._lock:
            self._take_back()
            offset = self._take(size)
        if _libc.fallocate(self.fd, 0, offset, size):
            error = ctypes.get_errno()
            self._returned.append((offset, size))
            raise ConfigurationError(
                f"shm: engine memory of {nbytes} bytes could not be had: {os.strerror(error)}. "
                f"{available} bytes of memory were available on this host."
            )
        return Allocation(self, offset, size)

    def free(self, offset: int, nbytes: int) -> None:
        """Return pages to the system and the space to the arena. Called by `Allocation`, in whichever thread drops it.

        The collector may do so in the middle of `allocate`, with the lock held: so this takes no lock.
        """
        if self.fd < 0 or os.getpid() != self._pid:
            return  # a forked child drops its references, but the memory is its parent's
        _libc.fallocate(self.fd, _PUNCH_HOLE, offset, nbytes)
        self._returned.append((offset, nbytes))

    def _take(self, size: int) -> int:
        for i, (offset, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        raise ConfigurationError(
            f"shm: {size} bytes of engine memory do not fit into this rank's address space of {self.capacity} bytes. "
            "Raise UNIDIST_SHM_CAPACITY_BYTES."
        )

    def _take_back(self) -> None:
        """Merge what was returned into the free space. With the lock held."""
        if not self._returned:
            return
        spaces = [*self._free]
        while self._returned:
            spaces.append(self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for start, room in sorted(spaces):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self._free = merged

    def __del__(self) -> None:
        # Tensors over engine memory hold their allocation, and that holds the arena: nobody looks any more.
        if self.address:
            self._unmap(self.address, self.capacity)
            self.address = 0
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


_living: weakref.WeakSet[Arena] = weakref.WeakSet()
_collect_at = _MANY


def _collect_garbage_if_many() -> None:
    """Collect garbage where many arenas are alive.

    Most of them belong to runtimes that have ended, and are held by tensors in reference cycles (a model and its
    optimizer). Such a cycle is a handful of objects to Python's collector, which sees no reason to look, but may hold
    gigabytes here. Those that stay are in use: there is no other collection before they are twice as many, for one
    takes a second where frameworks have traced much.
    """
    global _collect_at
    _collect_at = max(_MANY, min(_collect_at, 2 * len(_living)))
    if len(_living) >= _collect_at:
        gc.collect()
        _collect_at = max(_MANY, 2 * len(_living))


def available_memory() -> int:
    """Return the bytes that this process could still take: of the machine, and of its control group's limit."""
    available = _meminfo_available()
    for limit_path, usage_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = Path(limit_path).read_text().strip(), int(Path(usage_path).read_text())
        except (OSError, ValueError):
            continue
        if limit != "max":
            available = min(available, max(0, int(limit) - usage))
    return available


def _meminfo_available() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
