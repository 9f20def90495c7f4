"""Named operations: ranks match them by name, in whatever order each submits them. The interface.

`Negotiator` is the project's own implementation, over any communicator. An engine that agrees on names by itself
brings its own, see `NegotiatesNames`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from unidist.buffer import HOST, Buffer
from unidist.errors import UsageError
from unidist.negotiation.devices import DeviceConnector
from unidist.negotiation.request import Request
from unidist.observation import GroupCalls, Waitable, joining, observe_methods, submitting
from unidist.timeline import Recorder


class NamedHandle(Waitable):
    """A submitted operation, seen by its submitter."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the operation has ended, well or not. Never blocks."""

    @abstractmethod
    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when the operation is complete.

        Args:
            timeout: longest wait; default: the communicator's timeout, counted from the submission.

        Raises:
            MismatchError: the ranks asked for different things under this name. Raised on every rank; other
                operations are not affected.
            PeerLostError: a peer died, or the other side was closed.
            StalledError: the timeout ran out; says which ranks are missing.
        """

    @property
    @abstractmethod
    def result(self) -> Buffer:
        """The output: the request's target, or what its `allocate_output` returned. After `wait` only."""

    @property
    @abstractmethod
    def rows(self) -> tuple[int, ...]:
        """All-gather and all-to-all: rows of the output that came from each rank. After `wait` only."""


class NamedOperations(ABC):
    """Matches named operations over one group of ranks. Thread-safe. Every rank of the group has one.

    Attributes:
        rank: group rank of this process.
        size: number of ranks.
        observed: the record of this rank's calls, that of the communicator; None: nobody looks at it.
    """

    rank: int
    size: int
    observed: GroupCalls | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let operations keep record."""
        super().__init_subclass__(**kwargs)
        observe_methods(cls, {"submit": submitting, "join": joining})

    @abstractmethod
    def submit(self, request: Request, *, background: bool = False) -> NamedHandle:
        """Submit an operation and return at once.

        Args:
            request: what to do; its buffers belong to this object until the handle is done.
            background: bring it about without anybody waiting; otherwise it may move only while a thread waits for
                it or for another one, which can be faster.

        Raises:
            DuplicateNameError: an operation of this name is under way on this rank.
            UsageError: the request cannot be run, or this object is closed.
            PeerLostError: an earlier failure ended it; the same error again.
        """

    def run(self, request: Request) -> None:
        """Submit an operation, and return when it is complete. May be faster than the two calls; raises what they do.

        Args:
            request: what to do; of a kind whose result is its target.
        """
        self.submit(request).wait()

    @abstractmethod
    def join(self, serve: Callable[[str], None]) -> int:
        """Take part in the other ranks' all-reduces with zeros until every rank has joined; returns the last to join.

        Sums, and maxima of unsigned integers, are possible while a rank has joined; whatever else the others submit
        ends with MismatchError on every other rank; this one continues.

        Args:
            serve: called on this thread with the name of each all-reduce that was run with this rank's zeros, right
                after it: a chance to take part in what the others do under that name outside of this object.

        Raises:
            PeerLostError: a peer died.
            StalledError: the others neither submit nor join within the timeout.
        """

    def moves(self, memory: str) -> bool:
        """Return whether requests may have buffers in this kind of memory. The same on every rank; never blocks.

        Args:
            memory: "host", of which that is always true, or a device's kind, "cuda".
        """
        return memory == HOST

    @property
    def num_pauses(self) -> int:
        """How often this rank has paused because the ranks had submitted different operations; 0 if it never does."""
        return 0

    @property
    def cycle_time(self) -> timedelta | None:
        """The longest such pause, see `set_cycle_time`; None where it cannot be changed."""
        return None

    def set_cycle_time(self, cycle_time: timedelta) -> None:
        """Change the longest pause, on this rank; ranks may differ in it.

        Raises:
            UsageError: it cannot be changed.
        """
        raise UsageError(f"{type(self).__name__}: the cycle time cannot be changed, asked for was {cycle_time}")

    @abstractmethod
    def close(self) -> None:
        """End it; operations under way end with PeerLostError, here and on the other ranks. Idempotent."""


@dataclass(frozen=True)
class NegotiationOptions:
    """The user's choices, as `Settings` has them; every implementation takes what applies to it.

    Args:
        fusion_threshold_bytes: ready all-reduces are fused up to this size; 0 fuses none.
        cycle_time: longest pause between two rounds while ranks have submitted different operations.
        stall_check: an operation that waits longer is reported once, with the missing ranks; 0 reports none.
        stall_shutdown: an operation that waits longer ends with StalledError; 0 leaves that to the timeout.
        cache_capacity: how many operations are remembered, so that a repeated one is announced by a number.
        recorder: takes events for the timeline.
        on_failure: called once with the error that ended the named operations; or None.
        devices: connects the ranks for the memory of devices; None: host memory only.
    """

    fusion_threshold_bytes: int = 64 << 20
    cycle_time: timedelta = timedelta(milliseconds=1)
    stall_check: timedelta = timedelta(seconds=60)
    stall_shutdown: timedelta = timedelta(0)
    cache_capacity: int = 8192
    recorder: Recorder = field(default_factory=Recorder)
    on_failure: Callable[[BaseException], None] | None = None
    devices: DeviceConnector | None = None


class NegotiatesNames(ABC):
    """Capability of a communicator: its engine negotiates named operations itself. Found by isinstance."""

    @abstractmethod
    def named_operations(self, options: NegotiationOptions) -> NamedOperations:
        """Return the named operations over this communicator's ranks; they use it alone, and close it.

        Every rank of the group calls it with the same options.
        """
