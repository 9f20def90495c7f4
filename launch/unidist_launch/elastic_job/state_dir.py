"""A folder that holds what a launcher's successor needs, and belongs to one launcher at a time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from unidist.errors import ConfigurationError

_STATE, _LOCK = "state.json", "lock"
_FORMAT = 1


class StateDir:
    """The folder, locked for as long as this object is open and this process lives.

    The state is one file, of mode 600, for it holds the job's secret. It is written whole, next to the old one, and
    takes its place when it is on the disk: whenever the launcher dies, one of the two is there.

    Args:
        path: the folder; it is made, for this user alone, if it is not there.

    Raises:
        ConfigurationError: it cannot be used, or another launcher uses it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigurationError(f"--state-dir {str(path)!r} cannot be used: {exc}") from exc
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            os.close(self._lock)
            if not isinstance(exc, BlockingIOError):
                raise ConfigurationError(f"--state-dir {str(path)!r} cannot be locked: {exc}") from exc
            raise ConfigurationError(
                f"--state-dir {str(path)!r} is that of a job whose launcher runs (process {owner or 'unknown'}). Give "
                "every job a folder of its own"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def read(self) -> dict[str, Any] | None:
        """Return the state that a launcher left here; None if there is none.

        Raises:
            ConfigurationError: it is damaged, or others can read it.
        """
        path = self.path / _STATE
        try:
            with path.open("rb") as file:
                about = os.fstat(file.fileno())
                data = file.read()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise ConfigurationError(f"the state in {str(path)!r} cannot be read: {exc}") from exc
        if about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise ConfigurationError(f"{str(path)!r} holds a secret, and others may read or have written it; remove it")
        try:
            kept = json.loads(data)
            if kept["format"] != _FORMAT or kept["digest"] != _digest(kept["state"]):
                raise ValueError("format or digest")
        except (ValueError, KeyError, TypeError):
            raise damaged(self.path) from None
        state: dict[str, Any] = kept["state"]
        return state

    def write(self, state: dict[str, Any]) -> None:
        """Put a state in place of the one that is there; it is on the disk when this returns.

        Raises:
            OSError: that failed; the old one is still there.
        """
        data = json.dumps({"format": _FORMAT, "digest": _digest(state), "state": state}).encode()
        path = self.path / f"{_STATE}.new"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        path.replace(self.path / _STATE)
        self._sync_folder()

    def remove(self) -> None:
        """Remove the state: there is nothing to go on with. Nothing happens if there is none."""
        with contextlib.suppress(OSError):
            (self.path / _STATE).unlink(missing_ok=True)
            self._sync_folder()

    def close(self) -> None:
        """Let other launchers use the folder. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _sync_folder(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def damaged(path: Path) -> ConfigurationError:
    """Return the error that says so of the state in a folder."""
    return ConfigurationError(
        f"the state in {str(path / _STATE)!r} is damaged, or of another version of unidist. Remove it to begin the job "
        "anew; processes of the old one end by themselves"
    )


def _digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
