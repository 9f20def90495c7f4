"""Files for optimizer state offloaded to a folder. Knows no framework."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unidist.errors import ConfigurationError
from unidist.jobs.spill_file import unnamed_file


class StateFiles:
    """Creates files.

    Args:
        folder: on a fast disk with enough room for this host's optimizer state.

    Raises:
        ConfigurationError: the folder does not exist, or no file can be created in it.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir() or not os.access(self._folder, os.W_OK | os.X_OK):
            raise ConfigurationError(
                f"zero:offload={folder}: optimizer state shall be kept in files, but this is no folder that can be "
                "written to; give one, on every host (or offload=host, with PyTorch and an accelerator)"
            )

    @contextmanager
    def new(self, nbytes: int) -> Iterator[tuple[int, str]]:
        """Yield a file of this size, to be mapped: its descriptor, and its name. Neither is valid afterwards.

        Raises:
            ConfigurationError: the file system refuses; says how much was asked for.
        """
        try:
            with unnamed_file(self._folder, nbytes) as file:
                yield file
        except OSError as exc:
            raise ConfigurationError(
                f"zero:offload={self._folder}: {nbytes} bytes of optimizer state could not be had: {exc.strerror}. "
                "Give a folder with more room"
            ) from exc
