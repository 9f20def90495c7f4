"""`shard` for PyTorch's DataLoader: each sample of an epoch on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from unidist.elastic.batches import SampleOrder
from unidist.errors import UsageError
from unidist.mesh import SAMPLE_AXES
from unidist.runtime import context
from unidist.training.sharding import Tail, check_tail, share
from unidist_torch.elastic.loader import ElasticLoader


class ShardSampler(torch.utils.data.Sampler[int]):
    """Divides the samples of each epoch over the ranks; every iteration is the next epoch.

    Args:
        dataset: of constant length, the same on every rank.
        shuffle: in another order in each epoch, the same on every rank.
        seed: equal on every rank.
        tail: what happens to samples that do not divide, see `shard`.
    """

    def __init__(self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, tail: Tail = "pad") -> None:
        check_tail(tail)
        self.epoch = 0
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self._tail = tail

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch: after a restart, say."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        indices = self._share()
        self.epoch += 1
        return iter(indices)

    def __len__(self) -> int:
        return len(self._share())

    def _share(self) -> list[int]:
        runtime = context.current()
        return share(
            len(self._dataset),
            rank=runtime.axis_rank(SAMPLE_AXES),
            size=runtime.axis_size(SAMPLE_AXES),
            seed=self._seed,
            epoch=self.epoch,
            shuffle=self._shuffle,
            tail=self._tail,
        )


def shard(
    loader: torch.utils.data.DataLoader[Any], *, shuffle: bool | None = None, seed: int = 0, tail: Tail = "pad"
) -> torch.utils.data.DataLoader[Any]:
    """Return a DataLoader like this one that loads this rank's share of the samples.

    Ranks that hold parts of one model (along the axes `pipeline` and `tensor`) get the same samples. In an elastic job
    the loader that `TrainStep` trains on redistributes the samples when ranks join or leave: each sample counts once in
    an epoch, and those that do not divide make a smaller last batch (`tail="drop"`: are left out).

    Args:
        loader: over a dataset of known length, with batches of a size; the same on every rank.
        shuffle: in another order in each epoch, the same on every rank; default: as the loader does.
        seed: equal on every rank.
        tail: what happens to samples that do not divide: "pad" repeats the first ones of the epoch until all shares
            are equal; "drop" leaves the last ones out; "join" distributes them, so that the first ranks have one sample
            more: the others then call `ud.join()`.

    Raises:
        UsageError: an unknown tail, or a loader whose samples cannot be divided.
    """
    if isinstance(loader.dataset, torch.utils.data.IterableDataset) or loader.batch_size is None:
        raise UsageError(
            "shard() divides the samples of a dataset of known length, in batches: an IterableDataset or a "
            "batch_sampler of your own has to look at ud.data_rank() and ud.data_size() itself"
        )
    if shuffle is None:
        shuffle = isinstance(loader.sampler, torch.utils.data.RandomSampler)
        if not shuffle and not isinstance(loader.sampler, torch.utils.data.SequentialSampler):
            raise UsageError(
                f"the loader has a {type(loader.sampler).__name__}; shard() would replace it: say shuffle="
            )
    dataset: Any = loader.dataset
    return ElasticLoader(
        SampleOrder(len(dataset), seed, shuffle, drop_last=loader.drop_last or tail == "drop"),
        dataset=dataset,
        batch_size=loader.batch_size,
        sampler=ShardSampler(dataset, shuffle=shuffle, seed=seed, tail=tail),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
