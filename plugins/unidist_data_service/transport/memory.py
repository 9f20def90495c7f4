"""Memory that a data worker and a rank of the same host both map: batches travel in it without a copy by the kernel.

It is anonymous (memfd), so nothing can be left behind. The worker writes a batch to a region and names it in a message;
the rank uses the batch where it is, and gives the region back when nothing refers to it any more.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import stat
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

_TOKEN_BYTES = 16
_GRAIN_BYTES = 1 << 16


class MemoryRegion:
    """A piece of memory of a data worker.

    Args:
        number: names it on its connection.
        size: in bytes.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.fd = os.memfd_create("unidist-data", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self.memory = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes into it."""
        self.memory[offset : offset + len(data)] = data

    def close(self) -> None:
        """Give the worker's view of it back."""
        self.memory.close()
        os.close(self.fd)


class Regions:
    """The regions of one connection, on the worker's side. One thread takes, another one frees."""

    def __init__(self) -> None:
        self._regions: dict[int, MemoryRegion] = {}
        self._free: deque[int] = deque()
        self._count = 0
        token = MemoryRegion(-1, _TOKEN_BYTES)
        self._token, self.token = token, secrets.token_bytes(_TOKEN_BYTES)
        token.write(0, memoryview(self.token))
        self.token_path = f"/proc/{os.getpid()}/fd/{token.fd}"
        """A file with the token; only a process that sees this one's memory can read it."""

    def take(self, nbytes: int) -> MemoryRegion:
        """Return a region of at least this size that the rank does not use."""
        for _ in range(len(self._free)):
            found = self._regions[self._free.popleft()]
            if found.size >= nbytes:
                return found
            del self._regions[found.number]  # batches have grown
            found.close()
        size = -(-max(nbytes, 1) // _GRAIN_BYTES) * _GRAIN_BYTES
        made = self._regions[self._count] = MemoryRegion(self._count, size)
        self._count += 1
        return made

    def free(self, numbers: Iterable[int]) -> None:
        """Take regions back, which the rank has done with."""
        self._free.extend(numbers)

    def close(self) -> None:
        """Give all back. What the rank has mapped it keeps."""
        for region in (*self._regions.values(), self._token):
            region.close()
        self._regions.clear()


class MappedRegions:
    """The regions of one connection, on the rank's side."""

    def __init__(self) -> None:
        self._mapped: dict[int, mmap.mmap] = {}
        self._freed: deque[int] = deque()

    def view(self, number: int, path: str, size: int, nbytes: int) -> Any:
        """Return a buffer over the first bytes of a region, which is given back when nothing refers to the buffer.

        Args:
            number: of the region.
            path: at which it can be opened.
            size: of the region, in bytes.
            nbytes: of the buffer.

        Raises:
            OSError: it cannot be opened.
        """
        memory = self._mapped.get(number)
        if memory is None:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = self._mapped[number] = mmap.mmap(fd, size)
            finally:
                os.close(fd)
        buffer = (ctypes.c_ubyte * nbytes).from_buffer(memory)
        weakref.finalize(buffer, self._freed.append, number).atexit = False
        return buffer

    def take_freed(self) -> list[int]:
        """Return the regions that nothing refers to any more; each once."""
        return [self._freed.popleft() for _ in range(len(self._freed))]


def own_buffer(nbytes: int) -> Any:
    """Return a new buffer of this process."""
    return (ctypes.c_ubyte * nbytes)()


def can_map(path: str, token: bytes) -> bool:
    """Return whether this process can open the memory of the worker that told this path and token.

    On another host the path may be that of any process there, and of its pipe, from which nothing must be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and os.read(fd, _TOKEN_BYTES) == token
    except OSError:
        return False
    finally:
        os.close(fd)
