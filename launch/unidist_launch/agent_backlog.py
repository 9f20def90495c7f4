"""What a launcher that comes back has to hear from an agent: nothing that happened meanwhile is lost. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from unidist.control.wire import Message


class Backlog:
    """Remembers what an agent has sent, as far as it matters to the next launcher.

    Attributes:
        output: messages that the launcher has not taken, in order. With too many of them the agent stops reading.
    """

    def __init__(self) -> None:
        self.output: deque[Message] = deque()
        self._seats: dict[int, int] = {}
        self._ended: dict[int, tuple[int, int]] = {}  # by worker: process and exit code
        self._is_terminating = False

    def start(self, worker: int, seat: int) -> None:
        """A worker is being started, with this label."""
        self._seats[worker] = seat

    def note(self, message: Message) -> None:
        """The agent sends this, or would, if there were a launcher."""
        kind = message["type"]
        if kind == "output":
            self.output.append(message)
        elif kind == "exit":
            self._ended[int(message["worker"])] = int(message["pid"]), int(message["returncode"])
        elif kind == "terminating":
            self._is_terminating = True

    def taken(self) -> None:
        """The launcher has taken the next message of output."""
        if self.output:
            self.output.popleft()

    def facts(self, running: Iterable[tuple[int, int, int]]) -> Message:
        """Return what belongs into the agent's introduction.

        Args:
            running: number, label and process of the workers that run.
        """
        workers = [[number, seat, pid, None] for number, seat, pid in running]
        workers += [[number, self._seats[number], pid, code] for number, (pid, code) in self._ended.items()]
        return {"workers": workers, "terminating": self._is_terminating}
