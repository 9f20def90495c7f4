"""Waits for collectives: one that is done just when a slice of its wait ends, one that the backend forgot."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine gloo is PyTorch's")

from unidist.buffer import Buffer, DType  # noqa: E402 - after the check for torch
from unidist.errors import PeerLostError, StalledError  # noqa: E402
from unidist_torch.engines import group_work  # noqa: E402
from unidist_torch.engines.gloo import GlooCommunicator  # noqa: E402
from unidist_torch.engines.store import SharedStore  # noqa: E402


class _JustDone:
    """A work of torch that nobody can time so well: the first wait ends before it is done, and then it is done."""

    def __init__(self, failure: str = "") -> None:
        self._failure = failure
        self._waits = 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self._waits += 1
        if self._waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._failure:
            raise RuntimeError(self._failure)

    def is_completed(self) -> bool:
        return True


@pytest.fixture
def communicator() -> Iterator[GlooCommunicator]:
    found = GlooCommunicator(
        SharedStore(torch.distributed.HashStore(), lambda: None), "one", 0, (0,), timedelta(seconds=20), device_index=0
    )
    yield found
    found.close()


def _wait_for(communicator: GlooCommunicator, work: Any) -> None:
    communicator._group = SimpleNamespace(allreduce=lambda tensors, options: work)
    token = Buffer.allocate(1, DType.UINT8)
    communicator.allreduce(token, token).wait()


def test_it_has_succeeded(communicator: GlooCommunicator) -> None:
    _wait_for(communicator, _JustDone())


def test_or_has_failed(communicator: GlooCommunicator) -> None:
    with pytest.raises(PeerLostError, match="Connection closed by peer"):
        _wait_for(communicator, _JustDone("Connection closed by peer"))


class _Forgotten:
    """A work of torch whose connection was lost in the middle of a transfer: gloo never tells."""

    def wait(self, timeout: timedelta | None = None) -> None:
        time.sleep(0.01)
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


@pytest.mark.parametrize("operation", ["allreduce", "broadcast"])
def test_a_lost_connection_ends_a_wait_of_which_the_backend_says_nothing(
    communicator: GlooCommunicator, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr(group_work, "_FIRST_PROBE_SEC", 0.05)
    monkeypatch.setattr(group_work, "_LOST_SEC", 0.05)
    monkeypatch.setattr(group_work, "_LEFT_SEC", 0.05 if operation == "broadcast" else 1000.0)
    monkeypatch.setattr(communicator, "lost_peers", lambda: [1])
    communicator._group = SimpleNamespace(
        allreduce=lambda tensors, options: _Forgotten(),
        broadcast=lambda tensors, options: _Forgotten(),
        recv=lambda tensors, peer, tag: _Forgotten(),
    )
    token = Buffer.allocate(1, DType.UINT8)
    work = communicator.allreduce(token, token) if operation == "allreduce" else communicator.broadcast(token, root=0)
    with pytest.raises(PeerLostError, match="the connection to rank 1 is lost"):
        work.wait()


def test_a_rank_that_left_after_its_part_of_a_broadcast_is_no_loss_at_once(
    communicator: GlooCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_work, "_FIRST_PROBE_SEC", 0.01)
    monkeypatch.setattr(group_work, "_LOST_SEC", 0.01)
    monkeypatch.setattr(communicator, "lost_peers", lambda: [1])
    communicator._group = SimpleNamespace(broadcast=lambda tensors, options: _Forgotten())
    work = communicator.broadcast(Buffer.allocate(1, DType.UINT8), root=0)
    with pytest.raises(StalledError):
        work.wait(timedelta(seconds=0.3))
