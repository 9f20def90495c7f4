"""Messages that an agent keeps for a launcher that comes back, so that nothing is lost meanwhile. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from unidist.control.wire import Message


class Backlog:
    """Remembers what an agent has sent, as far as it matters to the next launcher."""

    def __init__(self) -> None:
        self._output: deque[Message] = deque()  # not taken yet; with too much of it the agent stops reading
        self._seats: dict[int, int] = {}
        self._exits: dict[int, Message] = {}  # by worker
        self._is_terminating = False

    def start(self, worker: int, seat: int) -> None:
        """A worker is being started, with this label."""
        self._seats[worker] = seat

    def note(self, message: Message) -> None:
        """The agent sends this, or would, if there were a launcher."""
        kind = message["type"]
        if kind == "output":
            self._output.append(message)
        elif kind == "exit":
            self._exits[int(message["worker"])] = message
        elif kind == "terminating":
            self._is_terminating = True

    def taken(self) -> None:
        """The launcher has taken the next message of output."""
        if self._output:
            self._output.popleft()

    def facts(self, running: Iterable[tuple[int, int, int]]) -> Message:
        """Return what belongs into the agent's introduction: among it its workers, and which of them have ended.

        Args:
            running: number, label and process of the workers that run.
        """
        workers = [[number, seat, pid, False] for number, seat, pid in running]
        workers += [[number, self._seats[number], int(end["pid"]), True] for number, end in self._exits.items()]
        return {"workers": workers, "terminating": self._is_terminating}

    def messages(self) -> list[Message]:
        """Return what is to be said again after it: first what workers wrote, then how they ended."""
        return [*self._output, *self._exits.values()]
