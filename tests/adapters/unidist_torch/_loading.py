"""Ranks of loaders one after the other in the test's own process: loading exchanges nothing but fingerprints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from unidist.mesh import SAMPLE_AXES
from unidist.optim.script_position import DrawnBatches
from unidist.runtime import context
from unidist.topology import Topology


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Be the ranks of a job without communication that have one share of the samples: the second one of two."""
    world = 2 * rank + 1, 2 * size
    runtime: Any = SimpleNamespace(
        topology=Topology(*world, *world),
        axis_rank=lambda axes: {SAMPLE_AXES: rank}[axes],
        axis_size=lambda axes: {SAMPLE_AXES: size}[axes],
        recorder=SimpleNamespace(data_sec=0.0),
        negotiator=None,
        is_elastic=False,
    )
    drawn = DrawnBatches(runtime)
    runtime.owned = lambda kind: drawn
    gather = "unidist_torch.loading.items.allgather_object"
    with (
        mock.patch.object(context, "current", return_value=runtime),
        mock.patch(gather, lambda operations, value, name: [value] * size),
    ):
        yield


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
