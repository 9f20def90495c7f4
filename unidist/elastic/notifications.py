"""Tells elastic states that hosts will be added or removed, by Horovod's names.

The coordinator of the job tells each process; the notification manager passes it on to its listeners, which are the
states of the functions under `run`, and objects of scripts that registered themselves.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from enum import IntFlag
from typing import Any, Protocol

from unidist.control.elastic import member

_log = logging.getLogger("unidist.elastic")


class HostUpdateResult(IntFlag):
    """The change to the hosts, or to their slots, that is about to happen."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class HostsListener(Protocol):
    """An object that is told of changes of the hosts: each `State`, and what a script registers."""

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Take note of a change; called by a separate thread.

        Args:
            timestamp: seconds since the epoch; grows with every change.
            update_res: whether ranks are added, removed or both.
        """


class WorkerNotificationManager:
    """Passes on each change of the hosts to its listeners. A process has one, `notification_manager`."""

    def __init__(self) -> None:
        self._listeners: set[HostsListener] = set()
        self._source: member.Member | None = None
        self._told_at = 0.0

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Begin to pass on what the job's coordinator tells; `run` does it. In a job that is not elastic: nothing.

        Args:
            args: Horovod's address of a rendezvous, not needed here.
            kwargs: the same.
        """
        present = member.present()
        if present is not None and present is not self._source:
            self._source = present
            present.on_change = self._tell

    def register_listener(self, listener: HostsListener) -> None:
        """Call `listener.on_hosts_updated` at each change from now on."""
        self._listeners.add(listener)

    def remove_listener(self, listener: HostsListener) -> None:
        """Take back `register_listener`; KeyError if it was not called."""
        self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Tell the listeners of a change, in this thread."""
        for listener in list(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)

    def repeat(self) -> None:
        """Tell the listeners again of a change that is wanted and has not taken place; they may have forgotten it."""
        present = self._source
        if present is not None and present.link.change_is_wanted:
            self._deliver(present.generation, joining=present.link.others_join, leaving=present.link.some_leave)

    def _tell(self, generation: int, *, joining: bool, leaving: bool) -> None:
        """Tell the listeners, not in this thread, which has to send heartbeats."""
        deliver = threading.Thread(
            target=self._deliver,
            args=(generation,),
            kwargs={"joining": joining, "leaving": leaving},
            name=f"unidist-hosts-updated-{next(_numbers)}",
            daemon=True,
        )
        deliver.start()

    def _deliver(self, generation: int, *, joining: bool, leaving: bool) -> None:
        if self._source is None or self._source.link.generation != generation:
            return  # that change has taken place
        self._told_at = max(time.time(), self._told_at + 1e-3)  # a state takes note of later ones only
        update = HostUpdateResult.added if joining else HostUpdateResult.no_update
        if leaving:
            update |= HostUpdateResult.removed
        try:
            self.handle_hosts_updated(self._told_at, update)
        except Exception:  # a script's listener; the job goes on
            _log.exception("a listener for changes of the hosts raised an error")


notification_manager = WorkerNotificationManager()
"""The one of this process."""

_numbers = itertools.count()
