"""A copy of a segment on another server, which goes on with it when the first one is lost.

The primary applies a change, passes it on, and acknowledges a push when the backup has applied it, too (primary-backup
replication). If one of the two is lost, the other one goes on alone. Which one that is, is claimed in the job's
directory, where the first claim holds: two servers that have lost their connection, and are both alive, do not both go
on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unidist.control import ChannelLost, Message, unexpected
from unidist_parameter_server.optimizers import Rule
from unidist_parameter_server.server.segment import DeposedError, Replica, StoreSegment
from unidist_parameter_server.wire import ArrayChannel, SegmentLayout, rules_of, told_rules
from unidist_parameter_server.wire.messages import Applied, CopyChange, CopyShard, Flush

Array = np.ndarray[Any, np.dtype[Any]]

_TIMEOUT_SEC = 10.0


class BackupLink(Replica):
    """The primary's connection to the backup of one segment.

    Args:
        channel: to the other server, which has answered to `replicate`.
        claim: claims the segment for this server, and returns whether it has it.
        report: is told why the backup was lost, if it was.
    """

    def __init__(self, channel: ArrayChannel, claim: Callable[[], bool], report: Callable[[str], None]) -> None:
        self._channel = channel
        self._claim = claim
        self._report = report
        self._lock = threading.Lock()
        self._is_broken = False
        self._reason = ""
        self._is_alone = False
        self._last: tuple[Sequence[Rule], Sequence[bool]] | None = None

    def fill(self, index: int, arrays: Sequence[Array]) -> None:
        """See `Replica.fill`."""
        self._send(CopyShard(index), arrays)

    def submit(
        self,
        index: int,
        version: int,
        pushes: Sequence[tuple[int, int]],
        change: Array,
        rules: Sequence[Rule],
        present: Sequence[bool],
        factor: float,
    ) -> None:
        """See `Replica.submit`."""
        with self._lock:
            is_news = self._last is None or self._last[0] is not rules or self._last[1] is not present
            self._last = rules, present
            told, chosen = (told_rules(rules), tuple(present)) if is_news else (None, None)
            self._send_locked(CopyChange(index, version, tuple(pushes), factor, told, chosen), [change])

    def wait(self) -> None:
        """See `Replica.wait`."""
        with self._lock:
            self._send_locked(Flush(), [])
            if not self._is_broken:
                try:
                    self._channel.receive(timeout_sec=_TIMEOUT_SEC)
                except (ChannelLost, TimeoutError) as exc:
                    self._break(str(exc))
            self._go_on_alone()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _send(self, message: Message, arrays: Sequence[Array]) -> None:
        with self._lock:
            self._send_locked(message, arrays)

    def _send_locked(self, message: Message, arrays: Sequence[Array]) -> None:
        if not self._is_broken:
            try:
                self._channel.send_with(message, arrays, timeout_sec=_TIMEOUT_SEC)
            except ChannelLost as exc:
                self._break(str(exc))

    def _break(self, reason: str) -> None:
        self._is_broken = True
        self._reason = reason
        self._channel.close()

    def _go_on_alone(self) -> None:
        if self._is_broken and not self._is_alone:
            if not self._claim():
                raise DeposedError("the backup has taken the segment over")
            self._is_alone = True
            self._report(self._reason)


def follow(channel: ArrayChannel, segment: StoreSegment) -> None:
    """Apply what the primary of a segment passes on, until the connection ends.

    Raises:
        ChannelLost: it has ended.
    """
    layout: SegmentLayout = segment.layout
    largest = max((shard.nbytes for shard in layout.shards), default=0)
    scratch = np.empty(largest, np.uint8)
    rules: Sequence[Rule] = ()
    present: Sequence[bool] = ()
    while True:
        try:
            message = channel.receive(timeout_sec=_TIMEOUT_SEC)
        except TimeoutError:
            continue  # the kernel finds out whether the other host is there
        match message:
            case Flush():
                channel.send(Applied(), timeout_sec=_TIMEOUT_SEC)
            case CopyShard(index):
                arrays = [np.empty_like(array) for array in segment.shards[index].arrays]
                for array in arrays:
                    channel.receive_array(array, timeout_sec=_TIMEOUT_SEC)
                segment.fill(index, arrays)
            case CopyChange(index, version, pushes, factor):
                if message.rules is not None and message.present is not None:
                    rules, present = rules_of(message.rules), message.present
                each = segment.shards[index]
                change = scratch[: each.shard.nbytes].view(each.contents.values.dtype)
                channel.receive_array(change, timeout_sec=_TIMEOUT_SEC)
                segment.replicated(index, version, pushes, change, rules, present, factor)
            case _:
                raise unexpected(message)
