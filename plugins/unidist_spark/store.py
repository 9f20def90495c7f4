"""The place where estimators keep data and trained models: a folder of any file system that fsspec knows."""

from __future__ import annotations

import posixpath
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from unidist.errors import ConfigurationError


class Store:
    """A folder that the driver and all executors reach.

    Args:
        prefix_path: a path, or an address such as `s3://bucket/folder` whose package for fsspec is installed.

    Raises:
        ConfigurationError: fsspec does not know such an address.
    """

    def __init__(self, prefix_path: str) -> None:
        self.prefix_path = prefix_path.rstrip("/")
        try:
            self.fs, self._root = fsspec.core.url_to_fs(self.prefix_path)
        except (ValueError, ImportError) as exc:
            raise ConfigurationError(f"Store.create({prefix_path!r}): {exc}") from exc

    @classmethod
    def create(cls, prefix_path: str) -> Store:
        """Return a store at a path or address."""
        return cls(prefix_path)

    def get_train_data_path(self, idx: str | None = None) -> str:
        """Return where the rows for training are."""
        return self._join("intermediate_train_data", idx)

    def get_val_data_path(self, idx: str | None = None) -> str:
        """Return where the rows for validation are."""
        return self._join("intermediate_val_data", idx)

    def get_runs_path(self) -> str:
        """Return where all runs are."""
        return self._join("runs")

    def get_run_path(self, run_id: str) -> str:
        """Return where a run is."""
        return self._join("runs", run_id)

    def get_checkpoint_path(self, run_id: str) -> str:
        """Return where a run's last model is."""
        return self._join("runs", run_id, "checkpoint")

    def get_state_path(self, run_id: str) -> str:
        """Return where a run's checkpoints are, from which it is resumed; "" if this store is not a folder."""
        if not isinstance(self.fs, LocalFileSystem):
            return ""
        return posixpath.join(self._root, "runs", run_id, "state")

    def has_state(self, run_id: str) -> bool:
        """Return whether a run can be resumed."""
        state = self.get_state_path(run_id)
        return bool(state) and bool(self.fs.glob(f"{state}/step-*"))

    def exists(self, path: str) -> bool:
        """Return whether there is something at a path of this store."""
        return bool(self.fs.exists(path))

    def read(self, path: str) -> bytes:
        """Return what is in a file."""
        return bytes(self.fs.cat_file(path))

    def write(self, path: str, data: bytes) -> None:
        """Write a file, with the folders that it needs. A reader sees what was there before, or all of it."""
        self.fs.makedirs(posixpath.dirname(path), exist_ok=True)
        part = f"{path}.part"
        self.fs.pipe_file(part, data)
        self.fs.mv(part, path)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.prefix_path,)  # file systems have connections

    def _join(self, *parts: str | None) -> str:
        return "/".join((self.prefix_path, *(part for part in parts if part)))
