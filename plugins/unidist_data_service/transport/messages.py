"""Messages between ranks and data workers. A worker speaks first, with `DataWorkerHere`."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from unidist.control import Message
from unidist_data_service.shards import DataShard
from unidist_data_service.transport.encoding import ArrayInfo

# From a rank


class Request(Message, kw_only=True):
    """What all of them have.

    Args:
        ticket: of the answer; -1: there is none.
        freed: regions of memory that the rank has done with.
        num_bytes: so many bytes follow.
    """

    ticket: int = -1
    freed: tuple[int, ...] = ()
    num_bytes: int = 0


class RankHere(Request):
    """Whether the rank maps the worker's memory."""

    maps: bool


class Define(Request):
    """Make a dataset. What makes it follows, sealed.

    Args:
        source: its name.
        size: number of data ranks.
        tail: what to do with batches that do not fill a round, see `unidist.training.Tail`.
        readers: number of the data rank by rank.
    """

    source: str
    size: int = 0
    tail: str = "pad"
    readers: dict[int, int] = field(default_factory=dict)


class SourceRequest(Request):
    """A request to a dataset, by its name."""

    source: str


class Fetch(SourceRequest):
    """Make a batch of these samples. -> Batch."""

    indices: Any
    seed: int


class AskSpec(SourceRequest):
    """What are the types of a batch? -> Spec."""

    shard: DataShard


class ReadStream(SourceRequest):
    """The rank's batch of a round of an epoch. -> Batch, or EndOfPart."""

    epoch: int
    reader: int
    shard: DataShard
    round: int


class LeaveEpoch(SourceRequest):
    """The rank reads no more of this epoch, and of those before."""

    epoch: int
    reader: int


# From a data worker


class DataWorkerHere(Message):
    """Who it is, and a file in its memory with a token: a rank that reads it there can map more."""

    name: str
    pid: int
    path: str
    token: bytes


class WorkerAnswer(Message):
    """An answer to the request with this ticket."""

    ticket: int


class Batch(WorkerAnswer):
    """A batch.

    Args:
        ticket: of the request.
        tree: of the batch.
        arrays: in it.
        region: number, path and size of the memory that has them; None: they follow.
    """

    tree: Any
    arrays: tuple[ArrayInfo, ...] = ()
    region: tuple[int, str, int] | None = None


class Spec(WorkerAnswer):
    """The types of a batch, as the dataset tells them."""

    spec: Any


class EndOfPart(WorkerAnswer):
    """The worker's part of the stream has ended."""


class MakingFailed(WorkerAnswer):
    """The dataset has raised an error of this kind. `text`: its traceback."""

    kind: str
    text: str


__all__ = [
    "WorkerAnswer", "AskSpec", "Batch", "Define", "EndOfPart", "Fetch", "LeaveEpoch", "MakingFailed", "RankHere",
    "ReadStream", "Request", "SourceRequest", "Spec", "DataWorkerHere",
]  # fmt: skip
