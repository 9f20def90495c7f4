"""Drop iterators of tf.data without blocking: destroying one can take seconds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["end_in_background", "read_to_its_end"]


def end_in_background(iterators: list[Any]) -> None:
    """Empty a list of iterators, which must hold the only references to them, in another thread.

    The destructor of a tf.data iterator waits for its autotuning thread. If that misses the signal to stop, it first
    sleeps to the end of its interval: a fraction of a second at first, up to a minute later. Other ranks, or all that
    read from this process, would be held up too.
    """
    threading.Thread(target=iterators.clear, name="unidist-iterator-end", daemon=True).start()


def read_to_its_end(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield what an iterator yields, then drop it by `end_in_background`. The caller must keep no reference to it."""
    held = [iterator]
    del iterator
    try:
        while True:
            try:
                batch = next(held[0])
            except StopIteration:
                return
            yield batch
    finally:
        end_in_background(held)
