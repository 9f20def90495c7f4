"""What a wait makes of an operation that is done in the moment in which it stops to wait for a while."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine gloo is PyTorch's")

from unidist.buffer import Buffer, DType  # noqa: E402 - after the check for torch
from unidist.errors import PeerLostError  # noqa: E402
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
