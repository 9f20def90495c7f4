"""Memory that the system may write to a disk: mapped files that have no name once they are used.

Nothing is left behind, however the process ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from unidist.errors import ConfigurationError


class SpillFolder:
    """Creates such files in one folder.

    Args:
        folder: on a fast disk, with room enough.
        option: that names the folder, for messages: "zero:offload".
        contents: of the files, for messages: "optimizer state".

    Raises:
        ConfigurationError: the folder does not exist, or no file can be created in it.
    """

    def __init__(self, folder: str | os.PathLike[str], *, option: str, contents: str) -> None:
        self.folder = os.path.abspath(folder)
        self._option = option
        self._contents = contents
        with self.file(1):
            pass

    @contextmanager
    def file(self, nbytes: int) -> Iterator[tuple[int, str]]:
        """Give a file of zeros, to be mapped within the block: its descriptor, and its name. Both end with the block.

        Args:
            nbytes: its size, above 0. The disk has room for it: a full one is found here, not while it is written to.

        Raises:
            ConfigurationError: the file system refuses; says how much was asked for.
        """
        try:
            descriptor, name = tempfile.mkstemp(dir=self.folder, prefix="unidist-")
            try:
                os.posix_fallocate(descriptor, 0, nbytes)
                yield descriptor, name
            finally:
                os.close(descriptor)
                os.unlink(name)
        except OSError as exc:
            raise ConfigurationError(
                f"{self._option}={self.folder}: no file for {nbytes} bytes of {self._contents} can be created there: "
                f"{exc.strerror}. Give a folder with room, on every host"
            ) from exc
