"""`data_service` for JAX: batches of numpy's arrays that data workers make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from unidist.errors import UsageError
from unidist.jobs.pool import dump_call
from unidist.negotiation import seal
from unidist.runtime import context
from unidist.training import timed
from unidist_data_service.client import DataWorkers, StreamBatches
from unidist_data_service.shards import DataShard
from unidist_data_service.transport import numpy_array
from unidist_data_service.worker import PURPOSE, FunctionSource


class ServedBatches:
    """Batches that data workers make. Each iteration is an epoch. Made by `data_service`.

    Args:
        batches: of this rank.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return timed(iter(self._batches))


def data_service(
    function: Callable[[DataShard], Iterable[Any]],
    *,
    ahead: int = 2,
    tail: Literal["pad", "drop"] = "pad",
) -> ServedBatches:
    """Return batches that the job's data workers make, which `unidist launch --data-workers` starts.

        def batches(shard):  # runs in the data workers
            for name in names[shard.index :: shard.count]:
                yield decode(name)

        for x, y in ud.data_service(batches):
            step(x, y)

    Each worker reads a part of the data, and makes batches of it. Every batch goes to one rank, and all ranks get
    equally many; ranks that hold parts of one model get the same ones. A worker that is lost is an error. All ranks
    have to call this.

    Args:
        function: returns the batches of a part of the data: trees of arrays. It is pickled (cloudpickle).
        ahead: number of batches that each worker is asked for at a time, at least 1.
        tail: what happens to a worker's last batches if they do not divide by the number of ranks. "pad" repeats the
            first ones of the epoch, "drop" leaves them out.

    Raises:
        UsageError: the function cannot be pickled, or the job is elastic.
        ConfigurationError: the job has no data workers.
        PeerLostError, StalledError: those that it has cannot be reached.
        DataWorkerError: in iterations: the dataset has raised.
    """
    runtime = context.current()
    if runtime.is_elastic:
        raise UsageError(
            "data_service() in an elastic job: batches that were read ahead would be for ranks that are gone. Use "
            "ud.shard() there"
        )
    if not callable(function):
        raise UsageError(
            f"data_service() of a {type(function).__name__}: give a function that makes the batches in a data worker"
        )
    sealed = bytes(seal(dump_call(FunctionSource, (function,), {}, to_other_machines=True), PURPOSE))
    return ServedBatches(StreamBatches(runtime.owned(DataWorkers), sealed, numpy_array, ahead=ahead, tail=tail))
