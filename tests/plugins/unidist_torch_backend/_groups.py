"""Process groups of `unidist` and of gloo over the same ranks, for tests that compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import unidist_torch_backend

TIMEOUT = timedelta(seconds=60)


@contextmanager
def world(folder: str, rank: int, size: int, backend: str = "unidist") -> Iterator[None]:
    """Make the default group of this rank; the ranks share an empty folder."""
    unidist_torch_backend.register()  # does nothing where the entry point did it
    store = dist.FileStore(f"{folder}/{backend}", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def with_both(folder: str, rank: int, size: int, function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Return what `function` returns in a world of `unidist`, and what it returns in one of gloo."""
    found = []
    for backend in ("unidist", "gloo"):
        with world(folder, rank, size, backend):
            torch.manual_seed(1234)
            found.append(function(*args))
    return found[0], found[1]
