"""A Chrome trace of what one rank does: open the file in chrome://tracing or https://ui.perfetto.dev.

One process row per rank, with a thread row per phase of a step: forward, backward, exchange, step. Events of a phase
that overlap, as exchanges do, get further rows. With `per_tensor` each tensor has a row, as in Horovod's timeline.
Event names are Horovod's where it has them.

The file is a JSON array. A process that dies leaves it without the closing bracket, which viewers accept.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from unidist.errors import ConfigurationError, UsageError

if TYPE_CHECKING:
    from unidist.communicator import Work

__all__ = [
    "Event",
    "Recorder",
    "Timeline",
]

_FLUSH_SECONDS = 0.05  # scripts read the file while it is written
_NUM_LANES = 32

Event = tuple[str, str, int, int, str]


class Recorder:
    """The recorder of a process; `timeline` is None while nothing is recorded.

    Attributes:
        timeline: the open timeline, or None.
        mark_cycles: record the start of every cycle of negotiation too.
        per_tensor: record each tensor of named operations on its own, in a row of its own.
        waited_sec: seconds that this process has waited for others so far, recorded or not: in `wait`, and for
            named operations.
        data_sec: seconds that the script has waited for its batches so far, apart from those of `data_clocks`.
    """

    timeline: Timeline | None = None
    mark_cycles: bool = False
    per_tensor: bool = False
    waited_sec: float = 0.0
    data_sec: float = 0.0

    def __init__(self) -> None:
        self.data_clocks: list[Callable[[], float]] = []
        """Return more seconds that the script has waited for its batches: those that a framework counts itself."""
        self._phases: dict[str, int] = {}  # that have begun, and when

    @property
    def all_data_sec(self) -> float:
        """Seconds that the script has waited for its batches so far, regardless of which code counted them."""
        return self.data_sec + sum(clock() for clock in self.data_clocks)

    def start(self, path: Path, *, rank: int, mark_cycles: bool = False, per_tensor: bool = False) -> None:
        """Record to `path` from now on; a path without "%r" is written by rank 0 alone.

        Raises:
            UsageError: a timeline is being recorded already.
            ConfigurationError: the file cannot be written.
        """
        if self.timeline is not None:
            raise UsageError(f"rank {rank} records the timeline {self.timeline.path} already; stop it first")
        self.mark_cycles, self.per_tensor = mark_cycles, per_tensor
        self.timeline = Timeline.for_rank(path, rank=rank, per_tensor=per_tensor)

    def begin(self, phase: str, *, again: bool = True) -> None:
        """Note that a phase of a step begins on this rank ("forward").

        Args:
            phase: name of its row.
            again: forget that it has begun before, without an end.
        """
        if self.timeline is not None and (again or phase not in self._phases):
            self._phases[phase] = time.monotonic_ns()

    def end(self, phase: str) -> None:
        """Record a phase that has begun; nothing if it has not."""
        began = self._phases.pop(phase, None) if self._phases else None
        if began is not None and self.timeline is not None:
            self.timeline.record(phase, phase.upper(), began, time.monotonic_ns())

    def wait(self, work: Work) -> None:
        """Wait for an operation that all ranks take part in, and add up how long that takes."""
        began = time.monotonic()
        work.wait()
        self.waited_sec += time.monotonic() - began

    def stop(self) -> None:
        """End the recording. Idempotent."""
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.close()


class Timeline:
    """Records events in memory and writes them from a background thread. Thread-safe.

    Code that records holds a `Recorder`, so that no timeline costs one test for None.

    Args:
        path: file to write; "%r" in its name becomes the rank. An existing file is replaced.
        rank: the rank of this process.
        per_tensor: events with a tensor's name are in a row of that name.

    Raises:
        ConfigurationError: the file cannot be written.
    """

    def __init__(self, path: Path, *, rank: int, per_tensor: bool = False) -> None:
        self.path = Path(str(path).replace("%r", str(rank)))
        self._rank = rank
        self._per_tensor = per_tensor
        self._rows: dict[str, int] = {}
        self._lanes: dict[str, list[int]] = {}  # of each row: when their last events ended
        self._events: list[Event] = []
        self._wake = threading.Event()
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = self.path.open("w", encoding="utf-8")
        except OSError as exc:
            raise ConfigurationError(
                f"rank {rank} cannot write the timeline to {self.path}: {exc.strerror}. Give --timeline another path."
            ) from exc
        name = {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        self._file.write("[\n" + json.dumps(name))
        self._file.flush()
        self._closed = False
        self._thread = threading.Thread(target=self._write_regularly, name="unidist-timeline", daemon=True)
        self._thread.start()

    @classmethod
    def for_rank(cls, path: Path | None, *, rank: int, per_tensor: bool = False) -> Timeline | None:
        """Return the timeline that rank `rank` shall write, or None.

        None when there is no path. A path without "%r" is one file, which rank 0 writes for itself.
        """
        if path is None or (rank != 0 and "%r" not in str(path)):
            return None
        return cls(path, rank=rank, per_tensor=per_tensor)

    def record(self, row: str, event: str, start_ns: int, stop_ns: int, *, tensor: str = "") -> None:
        """Add an event; costs one append to a list.

        Args:
            row: the phase ("exchange").
            event: what happened ("ALLREDUCE").
            start_ns: start, of `time.monotonic_ns`.
            stop_ns: end, of the same clock.
            tensor: name of the tensor or bucket that it is about; "" if it is about none.

        An event that comes after `close` is dropped: whatever was under way when a recording was stopped.
        """
        if not self._closed:
            self._events.append((row, event, start_ns, stop_ns, tensor))

    def close(self) -> None:
        """Write what is left and close the array. Idempotent."""
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=30)
        with self._lock:
            if not self._file.closed:
                self._write()
                self._file.write("\n]\n")
                self._file.close()

    def _write_regularly(self) -> None:
        while not self._wake.wait(_FLUSH_SECONDS):
            with self._lock:
                self._write()

    def _write(self) -> None:
        """Write the events so far; the lock is held. Each is preceded by its comma, so any prefix ends well."""
        count = len(self._events)
        if not count:
            return
        # Others append meanwhile: take exactly the first `count`, and delete them in one step.
        events = self._events[:count]
        del self._events[:count]
        lines = []
        for phase, event, start_ns, stop_ns, tensor in sorted(events, key=lambda each: each[2]):
            row = tensor if self._per_tensor and tensor else self._lane(phase, start_ns, stop_ns)
            if row not in self._rows:
                self._rows[row] = len(self._rows) + 1
                lines.append(self._line(row, name="thread_name", ph="M", args={"name": row}))
            told = {"args": {"tensor": tensor}} if tensor and row != tensor else {}
            lines.append(self._line(row, name=event, ph="X", ts=start_ns / 1e3, dur=(stop_ns - start_ns) / 1e3, **told))
        self._file.write("".join(lines))
        self._file.flush()

    def _lane(self, phase: str, start_ns: int, stop_ns: int) -> str:
        """Return the first row of a phase that is free at that time; viewers draw no events that overlap."""
        ends = self._lanes.setdefault(phase, [])
        lane = next((lane for lane, end in enumerate(ends) if end <= start_ns), len(ends))
        lane = min(lane, _NUM_LANES - 1)
        ends[lane : lane + 1] = [stop_ns]
        return phase if lane == 0 else f"{phase} {lane + 1}"

    def _line(self, row: str, **fields: object) -> str:
        return ",\n" + json.dumps({"pid": self._rank, "tid": self._rows[row], **fields})
