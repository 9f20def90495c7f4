"""Ranks of loaders one after the other in the test's own process: loading exchanges nothing but fingerprints."""

from __future__ import annotations

from collections.abc import Iterator
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
        data_place=lambda: (rank, size),
        recorder=SimpleNamespace(data_sec=0.0),
        negotiator=None,
        is_elastic=False,
    )
    drawn = DrawnBatches(runtime)
    runtime.owned = lambda kind: drawn
    gather = "unidist.training.items.allgather_object"
    with (
        mock.patch.object(context, "current", return_value=runtime),
        mock.patch(gather, lambda operations, value, name: [value] * size),
    ):
        yield
