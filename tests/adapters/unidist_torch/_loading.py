"""Ranks of loaders one after the other in the test's own process: loading exchanges nothing but fingerprints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from unidist.optim.script_position import DrawnBatches
from unidist.runtime import context
from unidist.topology import Topology


@contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Be this rank of a job without communication."""
    runtime: Any = SimpleNamespace(
        topology=Topology(rank, size, rank, size),
        axis_rank=lambda axis: rank,
        axis_size=lambda axis: size,
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
