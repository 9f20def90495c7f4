"""A data worker and ranks in one process: by memory that both map, and by tcp."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from unidist.jobs.pool import dump_call
from unidist.negotiation import seal
from unidist_data_service import DataShard, DataWorkerError
from unidist_data_service.client import DataWorkerLink, links
from unidist_data_service.transport import numpy_array
from unidist_data_service.transport.messages import Define, EndOfPart, Fetch, ReadStream, Request
from unidist_data_service.worker import PURPOSE, DataWorker, FunctionSource, IndexedSource

_SECRET = b"secret"
_LIMIT_SEC = 60


class Squares(IndexedSource):
    """Makes squares."""

    @override
    def fetch(self, indices: Any, seed: int) -> Any:
        if indices == [13]:
            raise ValueError("thirteen")
        return {"squares": np.array([index * index for index in indices]), "seed": seed}


def numbers(shard: DataShard) -> Iterator[Any]:
    yield from (np.full(1000, number) for number in range(shard.index, 8, shard.count))


@pytest.fixture
def worker() -> Iterator[DataWorker]:
    made = DataWorker("data worker 0", _SECRET, host="127.0.0.1")
    made.start()
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    thread.join(_LIMIT_SEC)
    made.close()


class Asking:
    """A rank that asks a worker."""

    def __init__(self, worker: DataWorker, source: type, *args: Any, readers: dict[int, int] | None = None) -> None:
        self.changed = threading.Condition()
        self.link = DataWorkerLink(0, ("127.0.0.1", worker.port), _SECRET, self.changed)
        self._tickets = 0
        told = Define("s", len(readers or {}), "pad", readers or {})
        self.link.send(told, bytes(seal(dump_call(source, args, {}), PURPOSE)))

    def ask(self, request: Request) -> Any:
        ticket, self._tickets = self._tickets, self._tickets + 1
        self.link.ask(ticket, request)
        with self.changed:
            assert self.changed.wait_for(lambda: ticket in self.link.replies or self.link.lost, _LIMIT_SEC)
            reply = self.link.replies.pop(ticket)
        return None if isinstance(reply.message, EndOfPart) else reply.batch(numpy_array)


@pytest.mark.parametrize("maps", [True, False], ids=["memory", "tcp"])
def test_batches_come_as_they_were_made(worker: DataWorker, maps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not maps:
        monkeypatch.setattr(links, "can_map", lambda path, token: False)
    rank = Asking(worker, Squares)
    assert rank.link.uses_memory is maps
    for start in range(20):
        found = rank.ask(Fetch("s", [start, start + 1], start))
        assert found["squares"].tolist() == [start**2, (start + 1) ** 2]
        assert found["seed"] == start
    rank.link.close()


def test_what_a_dataset_raises_has_the_traceback_of_the_worker(worker: DataWorker) -> None:
    rank = Asking(worker, Squares)
    with pytest.raises(DataWorkerError, match=r"raised ValueError in data worker 0 \(process \d+ at 127") as caught:
        rank.ask(Fetch("s", [13], 0))
    assert 'raise ValueError("thirteen")' in str(caught.value)
    assert rank.ask(Fetch("s", [2], 0))["squares"].tolist() == [4]
    rank.link.close()


def test_a_dataset_that_cannot_be_made_is_an_error_of_each_request(worker: DataWorker) -> None:
    rank = Asking(worker, Squares, "an argument too many")
    for _ in range(2):
        with pytest.raises(DataWorkerError, match="TypeError"):
            rank.ask(Fetch("s", [1], 0))
    rank.link.close()


def test_two_ranks_read_a_stream_in_two_epochs(worker: DataWorker) -> None:
    ranks = [Asking(worker, FunctionSource, numbers, readers={0: 0, 1: 1}) for _ in range(2)]
    for epoch in range(2):
        found: list[list[int]] = [[], []]
        for number in range(6):
            for place, rank in enumerate(ranks):
                batch = rank.ask(ReadStream("s", epoch, place, DataShard(0, 1), number))
                assert (batch is None) == (number >= 4), "requests behind the end are answered, too"
                if batch is not None:
                    found[place].append(int(batch[0]))
        assert found == [[0, 2, 4, 6], [1, 3, 5, 7]]
    for rank in ranks:
        rank.link.close()


def test_the_loss_of_a_worker_is_noticed(worker: DataWorker) -> None:
    rank = Asking(worker, Squares)
    worker.close()
    began = time.monotonic()
    with rank.changed:
        assert rank.changed.wait_for(lambda: bool(rank.link.lost), _LIMIT_SEC)
    assert time.monotonic() - began < 30
    rank.link.close()
