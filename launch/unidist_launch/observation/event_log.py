"""The events of an elastic job: the one place where they are published, for the log file and for observers.

A line of the file is a JSON object: `time` (seconds since the epoch), `event`, and what belongs to it. docs/elastic.md
lists the events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from unidist.errors import ConfigurationError

Listener = Callable[[str, dict[str, Any]], None]


class EventLog:
    """Publishes events.

    Args:
        path: file that lines are added to; None: none is kept.

    Raises:
        ConfigurationError: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None
        self._listeners: list[Listener] = []
        if path is not None:
            try:
                self._file = path.open("a", encoding="utf-8", buffering=1)
            except OSError as exc:
                raise ConfigurationError(f"--event-log {str(path)!r} cannot be written: {exc}") from exc

    def listen(self, listener: Listener) -> None:
        """Call this for every event from now on, with its name and fields, in the launcher's thread. Be quick."""
        self._listeners.append(listener)

    def publish(self, event: str, **fields: Any) -> None:
        """Tell everybody."""
        if self._file is not None:
            try:
                self._file.write(json.dumps({"time": round(time.time(), 6), "event": event, **fields}) + "\n")
            except OSError:  # the disk is full, say: training goes on
                self._file.close()
                self._file = None
        for listener in self._listeners:
            listener(event, fields)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
