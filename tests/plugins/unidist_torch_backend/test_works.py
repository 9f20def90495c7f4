"""When callbacks of futures run, and in which thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from unidist_torch_backend.process_group import UnidistProcessGroup, join_group


@pytest.fixture
def group() -> Iterator[UnidistProcessGroup]:
    """A group of this process."""
    made = join_group(dist.HashStore(), 0, 1, timedelta(seconds=20), name="alone")
    yield made
    made.shutdown()


def test_a_callback_that_is_attached_after_a_wait_runs_at_once_and_so_do_those_behind_it(
    group: UnidistProcessGroup,
) -> None:
    """The chains that torchft makes rely on it."""
    threads: list[int] = []
    work = group.allreduce([torch.ones(3)])
    work.wait()
    first = work.get_future().then(lambda done: threads.append(threading.get_ident()))
    first.then(lambda done: threads.append(threading.get_ident()))
    assert threads == [threading.get_ident()] * 2


def test_a_callback_that_is_attached_before_runs_in_the_thread_of_the_group(group: UnidistProcessGroup) -> None:
    """Even if the operation is complete: whether it is depends on the rank."""
    future = group.allreduce([torch.ones(3)]).get_future().then(lambda done: threading.get_ident())
    assert future.wait() != threading.get_ident()


def test_a_complete_future_takes_callbacks_when_its_group_has_ended(group: UnidistProcessGroup) -> None:
    future = group.allreduce([torch.ones(3)]).get_future()
    future.wait()
    group.abort()
    assert future.then(lambda done: 7).wait() == 7
