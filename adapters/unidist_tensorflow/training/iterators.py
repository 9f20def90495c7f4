"""The end of iterators of tf.data, which nobody should wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["end_in_background", "read_to_its_end"]


def end_in_background(iterators: list[Any]) -> None:
    """Give up the iterators of a list, which nothing else refers to, without waiting for their end.

    The end of an iterator of tf.data may miss that its autotuning thread is to stop, and then waits as long as that
    thread has planned to sleep: a fraction of a second at first, up to a minute later. The other ranks, or all who
    read from this process, would wait with it.
    """
    threading.Thread(target=iterators.clear, name="unidist-iterator-end", daemon=True).start()


def read_to_its_end(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield what an iterator yields, and give it up as `end_in_background` does. The caller keeps no reference."""
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
