"""Messages that an agent keeps for a launcher that comes back, so that nothing is lost meanwhile. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from unidist.control.codec import Message
from unidist.control.messages import Output, Terminating, WorkerExit


class Backlog:
    """Remembers what an agent has sent, as far as it matters to the next launcher."""

    def __init__(self) -> None:
        self._output: deque[Output] = deque()  # not taken yet; with too much of it the agent stops reading
        self._seats: dict[int, int] = {}
        self._exits: dict[int, WorkerExit] = {}  # by worker
        self.is_terminating = False
        """The agent was asked to end."""

    def start(self, worker: int, seat: int) -> None:
        """A worker is being started, with this label."""
        self._seats[worker] = seat

    def note(self, message: Message) -> None:
        """The agent sends this, or would, if there were a launcher."""
        match message:
            case Output():
                self._output.append(message)
            case WorkerExit(worker):
                self._exits[worker] = message
            case Terminating():
                self.is_terminating = True

    def taken(self) -> None:
        """The launcher has taken the next message of output."""
        if self._output:
            self._output.popleft()

    def workers(self, running: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int, bool], ...]:
        """Return the workers for the agent's introduction, with those that have ended.

        Args:
            running: number, label and process of the workers that run.
        """
        ended = ((number, self._seats[number], end.pid, True) for number, end in self._exits.items())
        return (*((number, seat, pid, False) for number, seat, pid in running), *ended)

    def messages(self) -> list[Message]:
        """Return what is to be said again after it: first what workers wrote, then how they ended."""
        return [*self._output, *self._exits.values()]
