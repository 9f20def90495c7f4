"""Memory of the shm engine that all ranks of a group share, with copy on write for each rank.

It lies in the arena of the group's first rank. Every rank maps it twice by itself: *shared*, and *private*, which
shows the same pages until this rank writes to one and gets a private copy. The kernel knows which pages
those are (`/proc/self/pagemap`), so nothing is compared, and writes need not be reported.

A header page says which ranks have let go. When all have, the first rank's arena takes the memory back.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.communicator_capabilities import SharedMemory
from unidist.engines._arena import Allocation
from unidist.errors import ConfigurationError

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PAGEMAP = "/proc/self/pagemap"
_ENTRY_BYTES = 8
_ENTRIES_AT_ONCE = 1 << 20
_HIGH_BYTE = _ENTRY_BYTES - 1 if sys.byteorder == "little" else 0
# Of an entry's highest byte (Documentation/admin-guide/mm/pagemap.rst): bit 7 the page is there, bit 6 it is swapped
# out, bit 5 it is the file's. One that is there and not the file's is a copy.
_OWN_COPY = bytes(high for high in range(256) if high & 0xC0 and not high & 0x20)
_UNTOUCHED = bytes(set(range(256)) - set(_OWN_COPY))
_RUNS = re.compile(b"[" + re.escape(_OWN_COPY) + b"]+")

_READ_WRITE, _SHARED, _PRIVATE, _NO_RESERVE = 0x3, 0x01, 0x02, 0x4000
_DONT_NEED = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


def obstacle() -> str:
    """Return why this system cannot tell which pages were written to, or "" if it can."""
    if Path(_PAGEMAP).exists():
        return ""
    return f"this system has no {_PAGEMAP} (Linux, CONFIG_PROC_PAGE_MONITOR)"


def mapping_bytes(nbytes: int) -> int:
    """Return the size of an allocation that `SharedPages` of `nbytes` need."""
    return _PAGE + max(_PAGE, -(-nbytes // _PAGE) * _PAGE)


def all_unmapped(allocation: Allocation, num_ranks: int) -> bool:
    """Return whether all ranks of the group have unmapped the memory."""
    return ctypes.string_at(allocation.address, num_ranks) == b"\1" * num_ranks


class SharedPages(SharedMemory):
    """One rank's part in memory that a group shares.

    Args:
        fd: the arena of the first rank; only used here.
        offset: of the allocation in it, of `mapping_bytes(nbytes)`.
        nbytes: size of what is shared.
        rank: this rank in the group, which has at most as many as there are bytes in a page.

    Raises:
        ConfigurationError: the system refuses the mapping.
    """

    def __init__(self, fd: int, offset: int, nbytes: int, rank: int) -> None:
        self._mappings = mappings = _Mappings(rank)
        size = mapping_bytes(nbytes)
        self._num_pages = size // _PAGE - 1
        self._shared = mappings.add_header(fd, offset, size) + _PAGE
        self._view = mappings.add(fd, offset + _PAGE, size - _PAGE, _PRIVATE | _NO_RESERVE)
        self.shared = Buffer(self._shared, nbytes, DType.UINT8, mappings)
        self.view = Buffer(self._view, nbytes, DType.UINT8, mappings)

    @override
    def publish(self, own: Sequence[tuple[int, int]]) -> None:
        for begin, end in list(self._written()):
            for start, nbytes in own:
                first, last = max(begin, start), min(end, start + nbytes)
                if first < last:
                    ctypes.memmove(self._shared + first, self._view + first, last - first)
            if _libc.madvise(self._view + begin, end - begin, _DONT_NEED):
                error = os.strerror(ctypes.get_errno())
                raise ConfigurationError(f"shm: the system does not take back pages of shared memory: {error}")

    def _written(self) -> Iterator[tuple[int, int]]:
        """Yield the byte ranges of `view`, in whole pages, of which this rank has a private copy."""
        first = self._view // _PAGE
        pagemap = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < self._num_pages:
                wanted = min(self._num_pages - done, _ENTRIES_AT_ONCE) * _ENTRY_BYTES
                high = os.pread(pagemap, wanted, (first + done) * _ENTRY_BYTES)[_HIGH_BYTE::_ENTRY_BYTES]
                if not high:
                    raise ConfigurationError(f"shm: {_PAGEMAP} ends before the memory of this process does")
                if high.translate(None, _UNTOUCHED):
                    for run in _RUNS.finditer(high):
                        yield (done + run.start()) * _PAGE, (done + run.end()) * _PAGE
                done += len(high)
        finally:
            os.close(pagemap)


class _Mappings:
    """The mappings of one rank. The buffers own it, so it ends with the last of them, and marks that in the header."""

    def __init__(self, rank: int) -> None:
        self._pid = os.getpid()
        self._rank = rank
        self._header = 0
        self._mapped: list[tuple[int, int]] = []

    def add_header(self, fd: int, offset: int, nbytes: int) -> int:
        """Map shared memory that begins with the header."""
        self._header = self.add(fd, offset, nbytes, _SHARED)
        return self._header

    def add(self, fd: int, offset: int, nbytes: int, flags: int) -> int:
        """Map a part of a file; returns the address."""
        address: int = _libc.mmap(None, nbytes, _READ_WRITE, flags, fd, offset)
        if address == _FAILED:
            raise ConfigurationError(
                f"shm: cannot map {nbytes} bytes of shared memory: {os.strerror(ctypes.get_errno())}. Allow this "
                "process more address space, or do without shared memory"
            )
        self._mapped.append((address, nbytes))
        return address

    def __del__(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child drops its references; its parent goes on
        if self._header:
            ctypes.memset(self._header + self._rank, 1, 1)
        for address, nbytes in self._mapped:
            _libc.munmap(address, nbytes)
