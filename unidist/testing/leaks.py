"""The resources of a process besides memory, to check that a piece of code released all of them.

>>> before = Resources.held()
>>> ...
>>> leaks = leaked_since(before)   # [] when everything was given back
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Collection, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

_IGNORED_VARIABLES = frozenset(("PYTEST_CURRENT_TEST", "COLUMNS", "LINES"))
_POLL_SEC = 0.01
_LOOK_SEC = 0.5


@dataclass(frozen=True)
class Resources:
    """The resources of a process at one moment; each item by a key, with its description.

    Args:
        threads: Python threads that are alive.
        descriptors: open files, sockets and pipes.
        children: processes that this one started and did not wait for.
        mappings: shared memory mapped without a name (memfd), and its size in bytes.
        shared_memory: files in /dev/shm.
        environment: environment variables.
    """

    threads: Mapping[object, str]
    descriptors: Mapping[object, str]
    children: Mapping[object, str]
    mappings: Mapping[object, str]
    shared_memory: Mapping[object, str]
    environment: Mapping[object, str]

    @classmethod
    def held(cls) -> Resources:
        """Return what this process holds now."""
        return cls(
            threads={id(thread): f"thread {thread.name!r}" for thread in threading.enumerate()},
            descriptors=_descriptors(),
            children=_children(),
            mappings=_mappings(),
            shared_memory={name: f"/dev/shm/{name}" for name in _listed("/dev/shm")},
            environment={
                (name, value): f"environment variable {name}={value!r}"
                for name, value in os.environ.items()
                if name not in _IGNORED_VARIABLES
            },
        )

    def beyond(self, earlier: Resources) -> dict[tuple[str, Any], str]:
        """Return what is held here and was not held `earlier`: in words, by a key that stays the same."""
        found: dict[tuple[str, Any], str] = {}
        for kind in ("threads", "descriptors", "children", "mappings", "shared_memory", "environment"):
            now, then = getattr(self, kind), getattr(earlier, kind)
            found |= {(kind, key): text for key, text in now.items() if key not in then}
        for name in earlier.variables - self.variables:
            found["environment", name] = f"environment variable {name} is gone"
        return found

    @property
    def variables(self) -> set[str]:
        """Names of the environment variables."""
        return {text.partition("=")[0].rpartition(" ")[2] for text in self.environment.values()}


def leaked_since(
    before: Resources, *, allowed: Container[object] = (), grace: timedelta = timedelta(seconds=10)
) -> list[str]:
    """Return what this process holds now and did not hold `before`, in words; [] when there is nothing.

    Args:
        before: an earlier `Resources.held()`.
        allowed: keys of `Resources.beyond` that may be there. So may files in /dev/shm that only processes use which
            are neither this one nor descend from it: the folder is the whole machine's. So may semaphores of Python's
            multiprocessing that none of these processes has open: another job that was killed leaves its own behind.
        grace: things on their way out (an ended thread, an object in a reference cycle) get this long.
    """
    look = time.monotonic()
    deadline = look + grace.total_seconds()
    strangers: set[tuple[str, str]] = set()
    while True:
        late = time.monotonic() > deadline
        found = {key: text for key, text in Resources.held().beyond(before).items() if key not in allowed}
        if late or time.monotonic() >= look:
            # What others use is remembered: a job that is killed leaves its files to nobody. To look takes long.
            strangers |= _used_by_strangers([key[1] for key in found if key[0] == "shared_memory"])
            look = time.monotonic() + _LOOK_SEC
        found = {key: text for key, text in found.items() if key not in strangers}
        if not found or late:
            return list(found.values())
        gc.collect()
        time.sleep(_POLL_SEC)


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _descriptors() -> dict[object, str]:
    found: dict[object, str] = {}
    for name in _listed("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            target = os.readlink(f"/proc/self/fd/{name}")
            found[name, target] = f"descriptor {name} ({target})"
    return found


def _children() -> dict[object, str]:
    found: dict[object, str] = {}
    for task in _listed("/proc/self/task"):
        with suppress(OSError):
            for pid in Path(f"/proc/self/task/{task}/children").read_text().split():
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[pid] = f"process {pid} ({command.strip()[:80] or 'ended, not waited for'})"
    return found


def _used_by_strangers(names: Collection[str]) -> set[tuple[str, str]]:
    """Return the keys of those files in /dev/shm that are other jobs' of this machine, and not this process's."""
    if not names:
        return set()
    own: set[str] = set()
    strangers = {name for name in names if name.startswith("sem.mp-")}
    family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended, or is another user's
            used = Path(f"/proc/{pid}/maps").read_text()
            for descriptor in _listed(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    used += os.readlink(f"/proc/{pid}/fd/{descriptor}") + "\n"
            (own if pid in family else strangers).update(name for name in names if f"/dev/shm/{name}" in used)
    return {("shared_memory", name) for name in strangers - own}


def _mappings() -> dict[object, str]:
    found: dict[object, str] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/memfd:"):
            found[fields[0]] = f"mapping {fields[0]} of {fields[5]}"
    return found
