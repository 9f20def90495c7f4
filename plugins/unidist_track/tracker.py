"""The interface of a tracker, and its registration by a plugin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import pluggy

from unidist.registry import Registry, load_object

hookspec = pluggy.HookspecMarker("unidist")


@dataclass(frozen=True)
class TrackedJob:
    """The job that is recorded.

    Args:
        title: name of its script or module.
        command: program and arguments of a rank.
        num_proc: ranks at the beginning.
    """

    title: str
    command: tuple[str, ...]
    num_proc: int


class Tracker(ABC):
    """Records the figures of one job.

    It lives in a process of its own, where all its methods are called in turn, in one thread: it may import what it
    likes, and wait. An exception ends the record with a warning; the job continues.

    Args:
        target: what the user wrote after the colon, never empty: a folder, a file or an address.
        job: that is recorded.
    """

    @abstractmethod
    def __init__(self, target: str, job: TrackedJob) -> None: ...

    @abstractmethod
    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Record a point.

        Args:
            step: updates of the optimizer so far, of the rank that has made most. An elastic job that goes back to a
                commit repeats steps.
            time: in seconds since the epoch.
            values: finite numbers by name. Those that scripts report have the script's names; the others are
                `steps_per_sec`, `samples_per_sec` (of all ranks), `waiting` (part of the time in which ranks wait for
                others, their mean, 0 to 1), `reading` (the same for batches), `memory_bytes` (of the largest rank),
                `world_size`, `generation` and `recoveries` (changes of the world so far).
        """

    @abstractmethod
    def close(self, exit_code: int | None) -> None:
        """Finish the record.

        Args:
            exit_code: of the job; None: the launcher died, and nobody knows.
        """


@dataclass(frozen=True)
class TrackerSpec:
    """A tracker, not yet imported.

    Args:
        name: as `--track NAME:TARGET` has it.
        path: "module:Class" of a `Tracker`.
        summary: one line for lists.
        module: that it needs, "" if none; whether it is installed is checked before the job starts.
        extra: of unidist's distribution that installs it, or the name of a package; for the message.
    """

    kind: ClassVar[str] = "tracker"
    hook: ClassVar[str] = "unidist_register_trackers"

    name: str
    path: str
    summary: str
    module: str = ""
    extra: str = ""

    def load(self) -> type[Tracker]:
        """Import and return the class."""
        return cast("type[Tracker]", load_object(self.path, f"tracker {self.name!r}"))


@hookspec
def unidist_register_trackers(registry: Registry[TrackerSpec]) -> None:
    """Register trackers. Called by `unidist launch --track`: be quick, and import no tracker's library."""
