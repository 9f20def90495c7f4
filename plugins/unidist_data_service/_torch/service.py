"""`data_service` for PyTorch: batches of a DataLoader, or of a stream, that data workers make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.utils.data
from torch.utils.data._utils.pin_memory import pin_memory

from unidist.errors import UsageError
from unidist.jobs.pool import dump_call
from unidist.negotiation import seal
from unidist.runtime import context
from unidist.training import read_ahead, timed
from unidist_data_service._torch.source import LoaderSource
from unidist_data_service.client import DataWorkers, IndexedBatches, StreamBatches
from unidist_data_service.shards import DataShard
from unidist_data_service.transport import ArrayInfo, numpy_array
from unidist_data_service.worker import PURPOSE, FunctionSource, check_indices
from unidist_torch.loading import Positioned, ShardedLoader


class ServedBatches:
    """Batches that data workers make. Each iteration is an epoch. Made by `data_service`.

    Args:
        batches: of this rank.
        ahead: number of batches that wait in pinned memory, where there is a GPU.
        loader: whose batches they are; None: those of a stream.
    """

    def __init__(
        self, batches: Iterable[Any], *, ahead: int, loader: torch.utils.data.DataLoader[Any] | None = None
    ) -> None:
        self._batches = batches
        self._ahead = ahead
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        sharded = self._loader if isinstance(self._loader, ShardedLoader) else None
        return self._iterate() if sharded is None else sharded.follow_reading(self._positioned(sharded))

    def _iterate(self) -> Iterator[Any]:
        if torch.cuda.is_available():
            return timed(read_ahead(self._batches, self._ahead, pin_memory))
        return timed(iter(self._batches))

    def _positioned(self, sharded: ShardedLoader) -> Iterator[Positioned]:
        begun = sharded.shards.begin()
        if isinstance(self._batches, IndexedBatches):
            self._batches.epoch, self._batches.first = begun.epoch, sharded.shards.num_before(begun)
        yield from sharded.with_positions(begun, self._iterate())

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is, see `shard`; batches that wait are not done.

        Raises:
            UsageError: the batches are not those of a loader of `shard`.
        """
        return self._sharded("state_dict").state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue where `state_dict` was called, see `shard`. Every rank calls it.

        Raises:
            UsageError: the batches are not those of a loader of `shard`, or the state is of other data.
        """
        self._sharded("load_state_dict").load_state_dict(state)

    def _sharded(self, asked: str) -> ShardedLoader:
        if isinstance(self._loader, ShardedLoader):
            return self._loader
        found = "a stream" if self._loader is None else f"a {type(self._loader).__name__}"
        raise UsageError(
            f"{asked}() of data_service() of {found}: only a loader of ud.shard() knows its position. Use "
            "ud.data_service(ud.shard(loader))"
        )

    def __len__(self) -> int:
        """Return the number of batches of an epoch.

        Raises:
            TypeError: those of a stream are not known.
        """
        if self._loader is None:
            raise TypeError("the length of a stream that data workers read is not known")
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch: after a restart, say."""
        if isinstance(self._loader, ShardedLoader):
            self._loader.set_epoch(epoch)
            return
        if isinstance(self._batches, IndexedBatches):
            self._batches.epoch = epoch
        samplers: list[Any] = [getattr(self._loader, name, None) for name in ("sampler", "batch_sampler")]
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)


def data_service(
    data: torch.utils.data.DataLoader[Any] | Callable[[DataShard], Iterable[Any]],
    *,
    ahead: int = 2,
    seed: int = 0,
    tail: Literal["pad", "drop"] = "pad",
) -> ServedBatches:
    """Return batches that the job's data workers make, which `unidist launch --data-workers` starts.

        loader = ud.data_service(ud.shard(DataLoader(dataset, batch_size=32)))

    Data workers make the batches of such a loader from its dataset and its `collate_fn`; this rank's sampler chooses
    the samples. So the batches are those of the loader, in its order, and the batches of a worker that is lost are made
    by the others.

        def batches(shard):  # runs in the data workers
            return DataLoader(Stream(files[shard.index :: shard.count]), batch_size=32)

        loader = ud.data_service(batches)

    Each worker reads a part of a stream. Every batch goes to one rank, and all ranks get equally many. Workers that are
    lost are an error then. All ranks have to call this.

    Args:
        data: a DataLoader over a dataset of known length, best of `ud.shard`; or a function that returns the batches of
            a part of the data. Either is pickled (cloudpickle).
        ahead: number of batches that each worker is asked for at a time, at least 1.
        seed: of what is random in a loader's dataset; batches do not depend on which worker makes them.
        tail: of a stream: what happens to its last batches if they do not divide by the number of ranks. "pad" repeats
            the first ones of the epoch, "drop" leaves them out.

    Raises:
        UsageError: such a loader cannot be read by workers, the data cannot be pickled, or the job is elastic.
        ConfigurationError: the job has no data workers.
        PeerLostError, StalledError: those that it has cannot be reached.
        DataWorkerError: in iterations: the dataset has raised.
    """
    runtime = context.current()
    if runtime.is_elastic:
        raise UsageError(
            "data_service() in an elastic job: batches that were read ahead would be for ranks that are gone. Use "
            "ud.shard(), and give the DataLoader num_workers="
        )
    rank, size = runtime.data_place()
    if not isinstance(data, torch.utils.data.DataLoader):
        if not callable(data):
            raise UsageError(f"data_service() of a {type(data).__name__}: give a DataLoader, or a function")
        sealed = bytes(seal(dump_call(FunctionSource, (data,), {}, to_other_machines=True), PURPOSE))
        workers = runtime.owned(DataWorkers)
        return ServedBatches(StreamBatches(workers, sealed, _tensor, ahead=ahead, tail=tail), ahead=ahead)
    if isinstance(data.dataset, torch.utils.data.IterableDataset):
        raise UsageError(
            "data_service() of a loader of an IterableDataset: give a function that makes it for a part of the data, "
            "data_service(lambda shard: DataLoader(...))"
        )
    loader: Any = data
    source = dump_call(LoaderSource, (loader.dataset, loader.collate_fn), {}, to_other_machines=True)
    workers = runtime.owned(DataWorkers)

    def indices() -> Iterator[Any]:
        chosen = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        return (check_indices(each) for each in chosen)

    batches = IndexedBatches(
        workers, bytes(seal(source, PURPOSE)), indices, _tensor, ahead=ahead, seed=seed * size + rank
    )
    return ServedBatches(batches, ahead=ahead, loader=loader)


def _tensor(info: ArrayInfo, buffer: Any, offset: int) -> Any:
    """Return a tensor over a buffer, or an array where the dataset has given one."""
    if info.kind == "torch":
        dtype = getattr(torch, info.dtype)
        if not info.nbytes:
            return torch.empty(info.shape, dtype=dtype)
        count = info.nbytes // dtype.itemsize
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).reshape(info.shape)
    return numpy_array(info, buffer, offset)
