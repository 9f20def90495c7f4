"""Memory mapped to files, whose pages the system may write to disk. Framework-free."""

from __future__ import annotations

import logging
import mmap
import os

import psutil

from unidist.jobs import SpillFolder

_log = logging.getLogger("unidist")
_IN_MEMORY = frozenset(("tmpfs", "ramfs"))


class FileMemory:
    """Allocates memory mapped to nameless files in one folder: nothing is left behind, however a rank ends.

    Args:
        folder: in a file system on a disk.
        rank: for messages.

    Raises:
        ConfigurationError: there is no such folder, or files cannot be created in it.
    """

    def __init__(self, folder: str, *, rank: int) -> None:
        self._files = SpillFolder(folder, option="activations=offload:path", contents=f"activations of rank {rank}")
        kind = _file_system(self._files.folder)
        if kind in _IN_MEMORY:
            _log.warning("activations=offload:path=%s: that is memory (%s), so nothing is saved", folder, kind)

    def allocate(self, num_bytes: int) -> mmap.mmap:
        """Return zeroed memory; it is freed when nothing refers to it any more.

        Raises:
            ConfigurationError: the file cannot be made as large; a full disk is found here, not while it is written to.
        """
        with self._files.file(num_bytes) as (descriptor, _):
            return mmap.mmap(descriptor, num_bytes)

    @staticmethod
    def let_go(memory: mmap.mmap) -> None:
        """Drop the pages from this process; their content stays, and is read back on access."""
        memory.madvise(mmap.MADV_DONTNEED)


def _file_system(folder: str) -> str:
    """Return the kind of file system that a folder is in."""
    real = os.path.realpath(folder)
    mounts = [item for item in psutil.disk_partitions(all=True) if _contains(item.mountpoint, real)]
    return max(mounts, key=lambda item: len(item.mountpoint)).fstype if mounts else ""


def _contains(mount: str, path: str) -> bool:
    return os.path.commonpath((mount, path)) == mount
