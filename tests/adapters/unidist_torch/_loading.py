"""What tests of loaders read from them, on ranks one after the other in the test's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from data_ranks import as_rank

__all__ = ["as_rank", "continued", "flat", "samples"]


def samples(batches: Iterable[Any]) -> list[list[Any]]:
    """Return the batches as lists."""
    return [batch.tolist() for batch in batches]


def flat(batches: list[Any]) -> list[Any]:
    """Return the samples of batches; one that is no list is a sample."""
    return [sample for batch in batches for sample in (batch if isinstance(batch, list) else [batch])]


def continued(make: Callable[[], Any]) -> list[Any]:
    """Read two steps on each of three ranks, and the rest of the epoch on two; return the sorted items."""
    seen, states = [], []
    for rank in range(3):
        with as_rank(rank, 3):
            sharded = make()
            read = iter(sharded)
            seen += [next(read).tolist() for _ in range(2)]
            states.append(sharded.state_dict())
    assert states[0] == states[1] == states[2]
    for rank in range(2):
        with as_rank(rank, 2):
            sharded = make()
            sharded.load_state_dict(states[0])
            seen += samples(sharded)
    return sorted(flat(seen))
