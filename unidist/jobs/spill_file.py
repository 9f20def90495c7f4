"""Files that have no name any more once they are used: memory that the system may write to a disk.

Nothing is left behind, however the process ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unnamed_file(folder: str | os.PathLike[str], nbytes: int) -> Iterator[tuple[int, str]]:
    """Give a file of zeros, to be mapped within the block: its descriptor, and its name. Both are of no use afterwards.

    Args:
        folder: where it is.
        nbytes: its size, above 0; there is room for it on the disk, which otherwise would kill the process later.

    Raises:
        OSError: the file system refuses.
    """
    descriptor, name = tempfile.mkstemp(dir=folder, prefix="unidist-")
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        yield descriptor, name
    finally:
        os.close(descriptor)
        os.unlink(name)
