"""Reading of batches: ahead of the step that needs them, and how long steps wait for them."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from unidist.errors import UsageError
from unidist.optim.script_position import DrawnBatches
from unidist.runtime import context

__all__ = ["read_ahead", "timed"]

B = TypeVar("B")

_CHECK_SEC = 0.2


def timed(batches: Iterator[B]) -> Iterator[B]:
    """Yield the batches, and count them, and the seconds that they are waited for: the launcher shows those.

    Args:
        batches: an iterator of this rank's batches.
    """
    for number in itertools.count(1):
        began = time.monotonic()
        try:
            batch = next(batches)
        except StopIteration:
            return
        runtime = context.current()
        runtime.recorder.data_sec += time.monotonic() - began
        runtime.owned(DrawnBatches).drawn(number)
        yield batch


def read_ahead(batches: Iterable[B], count: int, prepare: Callable[[B], B] | None = None) -> Iterator[B]:
    """Yield batches that a thread reads ahead. It ends with the iteration, also where that is left early.

    Args:
        batches: iterated over by the thread; an error there is raised here, behind the batches before it.
        count: number of batches that wait at most, at least 1.
        prepare: called by the thread on each batch.

    Raises:
        UsageError: `count` is below 1.
    """
    if count < 1:
        raise UsageError(f"prefetch({count}): give the number of batches that are read ahead, at least 1")
    return _read_ahead(batches, count, prepare)


def _read_ahead(batches: Iterable[B], count: int, prepare: Callable[[B], B] | None) -> Iterator[B]:
    waiting: queue.Queue[tuple[str, Any]] = queue.Queue(count)
    left = threading.Event()

    def put(kind: str, item: Any) -> None:
        while not left.is_set():
            with suppress(queue.Full):
                waiting.put((kind, item), timeout=_CHECK_SEC)
                return

    def read() -> None:
        try:
            for batch in batches:
                if left.is_set():
                    return
                put("batch", batch if prepare is None else prepare(batch))
            put("end", None)
        except BaseException as exc:
            put("error", exc)

    thread = threading.Thread(target=read, name="unidist-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, item = waiting.get()
            if kind == "error":
                raise item
            if kind == "end":
                return
            yield item
    finally:
        left.set()
        if threading.current_thread() is not thread:
            thread.join(_CHECK_SEC)
