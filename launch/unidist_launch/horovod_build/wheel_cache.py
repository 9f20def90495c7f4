"""Built wheels, kept by what they were built for and by which version of the builder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from unidist.errors import ConfigurationError

_LOOK_SEC = 0.2


class WheelCache:
    """Wheels of one distribution in a folder.

    Args:
        folder: of unidist's cache; None: "unidist" under $XDG_CACHE_HOME or ~/.cache.
        revision: of the builder: what another one has built is not looked at.
    """

    def __init__(self, folder: Path | None, *, revision: int) -> None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = (folder or home / "unidist").absolute()
        self._wheels = self.folder / "wheels" / f"r{revision}"

    def find(self, name: str, version: str) -> Path | None:
        """Return the wheel of this version for this Python and platform, or None."""
        python = f"cp{sys.version_info.major}{sys.version_info.minor}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        found = sorted(self._wheels.glob(f"{name}-{version}-{python}-*-{platform}.whl"))
        return found[0] if found else None

    def store(self, wheel: Path) -> Path:
        """Copy a wheel into the cache and return where it is; it appears there whole or not at all."""
        self._wheels.mkdir(parents=True, exist_ok=True)
        target = self._wheels / wheel.name
        partial = self._wheels / f".{wheel.name}.{os.getpid()}"
        try:
            shutil.copyfile(wheel, partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return target

    @contextlib.contextmanager
    def locked(self, *, timeout: timedelta, say: Callable[[str], None]) -> Iterator[None]:
        """Keep other builds out; waits for one that is at work, and says so.

        Raises:
            ConfigurationError: the cache cannot be written, or the other build goes on for longer than `timeout`.
        """
        try:
            self._wheels.mkdir(parents=True, exist_ok=True)
            lock = (self._wheels / ".lock").open("a+")
        except OSError as exc:
            raise ConfigurationError(
                f"the cache folder {self.folder} cannot be written: {exc.strerror}. Give another one: --cache-dir."
            ) from exc
        with lock:
            _take(lock.fileno(), self._wheels / ".lock", timeout, say)
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield


def _take(descriptor: int, path: Path, timeout: timedelta, say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            other = path.read_text() or "unknown"
        if not told:
            told = True
            say(f"another build is at work (process {other}); waiting for it")
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"another build (process {other}) holds {path} for longer than {timeout.total_seconds():g} s; "
                "look what it does, or give a longer --timeout"
            )
        time.sleep(_LOOK_SEC)
