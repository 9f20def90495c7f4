"""A Chrome trace of what one rank does: open the file in chrome://tracing or https://ui.perfetto.dev.

One process row per rank, one thread row per tensor or activity; event names are Horovod's where it has them.
The file is a JSON array. A process that dies leaves it without the closing bracket, which viewers accept.
"""

from __future__ import annotations

import json
import threading
import time
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

_FLUSH_SECONDS = 0.5

Event = tuple[str, str, int, int]


class Recorder:
    """The recorder of a process; `timeline` is None while nothing is recorded.

    Attributes:
        timeline: the open timeline, or None.
        mark_cycles: record the start of every cycle of negotiation too.
        waited_sec: seconds that this process has waited for others so far, recorded or not: in `wait`, and for
            named operations.
    """

    timeline: Timeline | None = None
    mark_cycles: bool = False
    waited_sec: float = 0.0

    def start(self, path: Path, *, rank: int, mark_cycles: bool = False) -> None:
        """Record to `path` from now on; a path without "%r" is written by rank 0 alone.

        Raises:
            UsageError: a timeline is being recorded already.
            ConfigurationError: the file cannot be written.
        """
        if self.timeline is not None:
            raise UsageError(f"rank {rank} records the timeline {self.timeline.path} already; stop it first")
        self.mark_cycles = mark_cycles
        self.timeline = Timeline.for_rank(path, rank=rank)

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

    Raises:
        ConfigurationError: the file cannot be written.
    """

    def __init__(self, path: Path, *, rank: int) -> None:
        self.path = Path(str(path).replace("%r", str(rank)))
        self._rank = rank
        self._rows: dict[str, int] = {}
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
    def for_rank(cls, path: Path | None, *, rank: int) -> Timeline | None:
        """Return the timeline that rank `rank` shall write, or None.

        None when there is no path. A path without "%r" is one file, which rank 0 writes for itself.
        """
        if path is None or (rank != 0 and "%r" not in str(path)):
            return None
        return cls(path, rank=rank)

    def record(self, row: str, event: str, start_ns: int, stop_ns: int) -> None:
        """Add an event; costs one append to a list.

        Args:
            row: what it is about: the tensor's name.
            event: what happened ("ALLREDUCE").
            start_ns: start, of `time.monotonic_ns`.
            stop_ns: end, of the same clock.

        An event that comes after `close` is dropped: whatever was under way when a recording was stopped.
        """
        if not self._closed:
            self._events.append((row, event, start_ns, stop_ns))

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
        for row, event, start_ns, stop_ns in events:
            if row not in self._rows:
                self._rows[row] = len(self._rows) + 1
                lines.append(self._line(row, name="thread_name", ph="M", args={"name": row}))
            lines.append(self._line(row, name=event, ph="X", ts=start_ns / 1e3, dur=(stop_ns - start_ns) / 1e3))
        self._file.write("".join(lines))
        self._file.flush()

    def _line(self, row: str, **fields: object) -> str:
        return ",\n" + json.dumps({"pid": self._rank, "tid": self._rows[row], **fields})
