"""Optimizer state in files that are mapped to memory: the system writes to disk what does not fit.

A file has no name any more once it is mapped, so nothing is left behind, however the process ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from unidist.errors import ConfigurationError

_IN_FILE = "_unidist_in_file"


class FileMemory:
    """Makes tensors whose memory is a file.

    Args:
        folder: where the files are: on a disk that is fast, with room for this host's share of the state.

    Raises:
        ConfigurationError: there is no such folder, or no file can be made in it.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir() or not os.access(self._folder, os.W_OK | os.X_OK):
            raise ConfigurationError(
                f"zero:offload={folder}: optimizer state shall be kept in files, but this is no folder that can be "
                "written to; give one, on every host"
            )

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor was made here."""
        return getattr(tensor, _IN_FILE, False)

    def zeros_like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return zeros of a tensor's shape and memory order, in a file of their own.

        Raises:
            ConfigurationError: the file system refuses; says how much was asked for.
        """
        dtype = dtype or tensor.dtype
        nbytes = tensor.numel() * dtype.itemsize
        if not nbytes:
            return torch.zeros_like(tensor, dtype=dtype)
        try:
            descriptor, name = tempfile.mkstemp(dir=self._folder, prefix="unidist-")
            try:
                os.posix_fallocate(descriptor, 0, nbytes)  # or a full disk would kill the process at some later write
                flat = torch.from_file(name, shared=True, size=tensor.numel(), dtype=dtype)
            finally:
                os.close(descriptor)
                os.unlink(name)
        except OSError as exc:
            raise ConfigurationError(
                f"zero:offload={self._folder}: {nbytes} bytes of optimizer state could not be had: {exc.strerror}. "
                "Give a folder with more room"
            ) from exc
        made = flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())
        setattr(made, _IN_FILE, True)
        return made

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with these values in a file; itself if it is in one."""
        if self.holds(tensor):
            return tensor
        made = self.zeros_like(tensor)
        made.copy_(tensor.detach())
        return made


class StateInFiles(TorchFunctionMode):
    """While this is entered, the state that an optimizer makes for its parameters begins its life in files.

    Made in ordinary memory and then moved it would be there at once, all of it.

    Args:
        files: where to.
        leaves: the optimizer's parameters.
    """

    def __init__(self, files: FileMemory, leaves: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._files = files
        self._leaves = {id(leaf) for leaf in leaves}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let `torch.zeros_like` of a parameter give memory of a file."""
        kwargs = kwargs or {}
        if func is torch.zeros_like and args and id(args[0]) in self._leaves:
            return self._files.zeros_like(args[0].detach(), kwargs.get("dtype"))
        return func(*args, **kwargs)
