"""Locks between processes that the kernel releases when their holder dies.

These are POSIX record locks (fcntl) on single bytes of a file that has no contents. They belong to a process: a child
that it forks does not inherit them, so a data loader's worker holds none of them. Threads of one process do not exclude
each other.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock` of Linux on 64-bit machines: type, whence, start, length, process."""


class ProcessLocks:
    """The locks of one process.

    Args:
        path: of a file that all processes open; it may be unlinked afterwards.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def try_lock(self, number: int) -> bool:
        """Take a lock, from 0, if no other process holds it, and return whether it was taken."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError as exc:
            if exc.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def unlock(self, number: int) -> None:
        """Release a lock."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, number)

    @contextmanager
    def hold(self, number: int, wait: Callable[[Callable[[], bool]], None]) -> Iterator[None]:
        """Hold a lock within a block.

        Args:
            number: of the lock.
            wait: waits until a condition holds, or raises.
        """
        if not self.try_lock(number):
            wait(lambda: self.try_lock(number))
        try:
            yield
        finally:
            self.unlock(number)

    def holder(self, number: int) -> int:
        """Return the process that holds a lock, 0 if no other one does; -1 for one that this process cannot see."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        kind, _, _, _, process = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        return 0 if kind == fcntl.F_UNLCK else int(process) or -1

    @property
    def descriptor(self) -> int:
        """The file's, for C code that locks: `fcntl` with F_SETLK."""
        return self._fd

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called."""
        return self._fd >= 0

    def close(self) -> None:
        """Release all locks of this process. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()
