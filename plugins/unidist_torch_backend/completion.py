"""The thread of a process group that moves operations while the script computes, and completes futures.

It does one task after the other, in the order in which the script issued them: "complete this operation", "run this
callback". That order is the program's, and so the same on every rank, whatever the timing. Operations that a callback
starts (as PowerSGD's do) travel on a second communicator, in the order of the callbacks; they cannot meet those
of the script in different orders on different ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Protocol

_log = logging.getLogger("unidist.torch_backend")
_SHORTEST_PAUSE_SEC = 50e-6
_LONGEST_PAUSE_SEC = 1e-3
_STOP_SEC = 5.0


class CompletionTask(Protocol):
    """Something that the thread does when its time has come."""

    @property
    def is_over(self) -> bool:
        """Whether it waits for nothing any more: `poll` would do what is left. Never blocks."""

    def poll(self) -> bool:
        """Do it if it can be done now, and return whether it was. Never blocks for a peer, nor raises."""


class Completion:
    """The thread, started when there is first something to do.

    Args:
        name: of the group, for the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition(threading.Lock())
        self._tasks: deque[CompletionTask] = deque()
        self._messages: list[CompletionTask] = []
        self._thread: threading.Thread | None = None
        self._sleeps = False
        self._stopped = False

    @property
    def is_current(self) -> bool:
        """The caller is this thread."""
        return threading.current_thread() is self._thread

    @property
    def is_busy(self) -> bool:
        """Something was issued and is not complete."""
        with self._condition:
            return not all(task.is_over for task in (*self._tasks, *self._messages))

    def add(self, task: CompletionTask) -> None:
        """Do a task after all that were added before; at once, on the calling thread, if this one was stopped."""
        with self._condition:
            if not self._stopped:
                self._tasks.append(task)
                self._wake()
                return
        task.poll()

    def add_message(self, task: CompletionTask) -> None:
        """Do a task whenever it can be done: messages wait for their sender, not for each other."""
        with self._condition:
            if not self._stopped:
                self._messages.append(task)
                self._wake()
                return
        task.poll()

    def stop(self) -> None:
        """End the thread, after it has done what can be done at once. Idempotent. From any thread, this one too."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_SEC)

    def drain(self) -> None:
        """Do, on the calling thread, what can be done now of the tasks that `stop` left. Does nothing on this thread.

        Where the communicator is closed by then, this is all of them: operations end with an error.
        """
        if not self.is_current:
            self._do_the_rest()

    def _do_the_rest(self) -> None:
        while self._tasks and self._tasks[0].poll():
            self._tasks.popleft()
        self._messages = [message for message in self._messages if not message.poll()]

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"unidist {self._name}", daemon=True)
            self._thread.start()
        elif self._sleeps:
            self._condition.notify()

    def _run(self) -> None:
        pause = _SHORTEST_PAUSE_SEC
        while True:
            with self._condition:
                while not self._tasks and not self._messages and not self._stopped:
                    self._sleeps = True
                    self._condition.wait()
                    self._sleeps = False
                if self._stopped:
                    break
                head = self._tasks[0] if self._tasks else None
                messages = list(self._messages)
            moved = False
            try:
                if head is not None and head.poll():
                    moved = True
                    self._tasks.popleft()
                arrived = [message for message in messages if message.poll()]
            except BaseException:  # of a task that breaks its promise: the others count
                _log.exception("a task of the process group %s failed", self._name)
                arrived = []
            if arrived:
                moved = True
                with self._condition:
                    self._messages = [message for message in self._messages if message not in arrived]
            pause = _SHORTEST_PAUSE_SEC if moved else min(2 * pause, _LONGEST_PAUSE_SEC)
            if not moved:
                time.sleep(pause)
        self._do_the_rest()
