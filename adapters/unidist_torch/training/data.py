"""`shard` for PyTorch's DataLoader: each sample of an epoch on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.utils.data

from unidist.elastic.batches import SampleOrder
from unidist.errors import UsageError
from unidist.runtime import context
from unidist.training.items import BudgetItems, DatasetItems, Items, check_budget, lengths_of
from unidist.training.sharding import Tail, check_tail
from unidist.training.token_budget import TokenBudget
from unidist_torch.elastic.loader import ElasticLoader
from unidist_torch.loading import (
    InitWorker,
    SamplerItems,
    ShardedLoader,
    ShardSampler,
    StreamBatches,
    StreamShards,
)

Cost = Sequence[float] | Callable[[Any], float]


def shard(
    loader: torch.utils.data.DataLoader[Any],
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    tail: Tail = "pad",
    cost: Cost | None = None,
    max_tokens: float | None = None,
    window: int | None = None,
) -> ShardedLoader:
    """Return a DataLoader like this one that loads this rank's share of the samples.

    Each rank gets its share of what the loader gives: of the samples of a dataset or of a sampler, every batch of a
    `batch_sampler` on one rank, or every element of an IterableDataset on one rank and one worker. A sampler draws the
    same on every rank, with seeds of the epoch. Ranks that hold parts of one model (along the axes `pipeline` and
    `tensor`) get the same samples.

    `state_dict()` and `load_state_dict(state)` of the result continue in the middle of an epoch, with any number of
    ranks.

    In an elastic job the loader that `TrainStep` trains on redistributes the samples when ranks join or leave: each
    sample counts once in an epoch, and those that do not divide make a smaller last batch (`tail="drop"`: are left
    out). That needs a `batch_size`, and no sampler of yours.

    Args:
        loader: the same on every rank.
        shuffle: the samples of the dataset in another order in each epoch, the same on every rank, or in its order;
            then a sampler is not asked. Default: as the loader does.
        seed: of the order, or of the global random generators while a sampler or a stream draws; equal on every rank.
        tail: what happens to samples (batches, elements) that do not divide: "pad" repeats the first ones of the epoch
            until all shares are equal; "drop" leaves the last ones out; "join" distributes them, so that the first
            ranks have one more: the others then call `ud.join()`.
        cost: of each sample, such as its number of tokens, by its index, or of an element of a stream: the samples of
            a step are divided so that each rank has as many and the sums of costs are about equal.
        max_tokens: with `cost` as lengths, a batch has samples of about one length, as many as there is room for: the
            number of samples times the longest length is at most this. A `batch_size` above 1 is the most samples of a
            batch. So every rank has about as much to do in each step, with little padding.
        window: with `max_tokens`, the number of samples in the order of the epoch that are sorted by length together.
            More are less padding and less chance. Default: those of about 50 batches.

    Raises:
        UsageError: an unknown tail, something else than a loader, or one whose samples cannot be divided; a sample is
            longer than `max_tokens`. In iterations: a sampler draws other samples on another rank.
    """
    check_tail(tail)
    check_budget(cost, max_tokens, window)
    _check_stream_budget(loader, max_tokens)
    _check_loader(loader, keeps_sampler=shuffle is None)
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return _shard_stream(loader, shuffle=shuffle, seed=seed, tail=tail, cost=cost)
    if loader.batch_size is None and loader.batch_sampler is not None:
        return _shard_batches(loader, shuffle=shuffle, seed=seed, tail=tail, cost=cost)
    _check_cost(loader, cost)
    dataset: Any = loader.dataset
    shuffles = _shuffles(loader) if shuffle is None else shuffle
    items: Items
    if shuffles is None:
        items = SamplerItems(loader.sampler, num_samples=_length(dataset), seed=seed)
    else:
        items = DatasetItems(len(dataset), shuffle=shuffles, seed=seed)
    if max_tokens is not None and cost is not None:
        lengths = lengths_of(cost, _known_length(dataset))
        size = loader.batch_size or 1  # 1 is what a DataLoader has if nothing is said
        budget = TokenBudget.of(lengths, max_tokens=max_tokens, max_samples=size if size > 1 else None, window=window)
        order_seed = None if shuffles is False else seed
        batches = BudgetItems(items, lengths, budget, seed=order_seed, drop_last=loader.drop_last)
        return _of_batches(loader, batches, tail=tail)
    sampler = ShardSampler(items, batch_size=loader.batch_size or 1, tail=tail, cost=_function(cost))
    options = _options(loader) | {
        "dataset": dataset, "batch_size": loader.batch_size, "sampler": sampler, "drop_last": loader.drop_last,
    }  # fmt: skip
    if shuffles is None or cost is not None or loader.batch_size is None:
        return ShardedLoader(sampler, **options)
    order = SampleOrder(len(dataset), seed, shuffles, drop_last=loader.drop_last or tail == "drop")
    return ElasticLoader(order, sampler, **options)


def _shard_batches(loader: Any, *, shuffle: bool | None, seed: int, tail: Tail, cost: Cost | None) -> ShardedLoader:
    if shuffle is not None:
        raise UsageError(
            f"shard(shuffle={shuffle}) of a loader with a batch_sampler: that chooses the samples of each batch. Leave "
            "shuffle= out, or give the DataLoader a batch_size"
        )
    _check_cost(loader, cost)
    return _of_batches(
        loader, SamplerItems(loader.batch_sampler, num_samples=_length(loader.dataset), seed=seed), tail=tail
    )


def _of_batches(loader: Any, batches: Items, *, tail: Tail) -> ShardedLoader:
    sampler = ShardSampler(batches, tail=tail)
    return ShardedLoader(sampler, dataset=loader.dataset, batch_sampler=sampler, **_options(loader))


def _shard_stream(loader: Any, *, shuffle: bool | None, seed: int, tail: Tail, cost: Cost | None) -> ShardedLoader:
    if shuffle is not None:
        raise UsageError(
            f"shard(shuffle={shuffle}) of a loader of {type(loader.dataset).__name__}, an IterableDataset: its order "
            "is its own. Leave shuffle= out, and shuffle in the dataset"
        )
    _check_cost(loader, cost)
    if cost is not None and not callable(cost):
        raise UsageError("shard(cost=) of an IterableDataset: give a function of an element, which has no index")
    batches = StreamBatches(
        loader.dataset,
        batch_size=loader.batch_size,
        collate=loader.collate_fn,
        drop_last=loader.drop_last,
        seed=seed,
        tail=tail,
        cost=cost,
    )
    options = _options(loader) | {"collate_fn": _same}
    if loader.worker_init_fn is not None:
        options["worker_init_fn"] = InitWorker(loader.worker_init_fn)
    return ShardedLoader(StreamShards(batches, seed=seed), dataset=batches, batch_size=None, **options)


def _check_loader(loader: object, *, keeps_sampler: bool) -> None:
    if not isinstance(loader, torch.utils.data.DataLoader):
        how = "ud.shard(DataLoader(data, batch_size=32, shuffle=True))"
        if not hasattr(loader, "__getitem__") or isinstance(loader, torch.utils.data.IterableDataset):
            how = (
                "for a stream make an IterableDataset whose __iter__ yields the elements, the same on every rank, and "
                "ud.shard(DataLoader(dataset, batch_size=32))"
            )
        raise UsageError(
            f"shard() of a {type(loader).__name__} ({_rank()}): it divides the samples of a DataLoader: {how}"
        )
    if isinstance(loader, ShardedLoader):
        raise UsageError(
            f"shard() of a loader that shard() has made ({_rank()}): each rank would get a part of its part"
        )
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if keeps_sampler and any(isinstance(each, torch.utils.data.DistributedSampler) for each in samplers):
        raise UsageError(
            f"shard() of a loader with a DistributedSampler ({_rank()}), which divides the samples already: leave "
            "one of them out"
        )


def _check_cost(loader: Any, cost: Cost | None) -> None:
    if cost is not None and loader.batch_size is None:
        raise UsageError(
            "shard(cost=) divides the samples of a step, and this loader has batches that go to one rank as they are. "
            "Leave cost= out, or give the DataLoader a batch_size"
        )


def _check_stream_budget(loader: Any, max_tokens: float | None) -> None:
    if max_tokens is None or not isinstance(loader, torch.utils.data.DataLoader):
        return
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise UsageError(
            "shard(max_tokens=) of an IterableDataset, whose lengths are not known before it is read: give the dataset "
            "a __getitem__, or make such batches in the stream and a DataLoader(..., batch_size=None)"
        )


def _known_length(dataset: Any) -> int:
    found = _length(dataset)
    if found is None:
        raise UsageError("shard(max_tokens=) of a dataset without a length: give it a __len__")
    return found


def _rank() -> str:
    return f"rank {context.current().topology.rank}"  # asked for in errors only: loaders may be made before init()


def _shuffles(loader: Any) -> bool | None:
    """Return whether the loader's sampler gives each sample once, in random order or in order; None: neither."""
    sampler = loader.sampler
    if type(sampler) not in (torch.utils.data.SequentialSampler, torch.utils.data.RandomSampler):
        return None
    is_random = isinstance(sampler, torch.utils.data.RandomSampler)
    gives_each = len(sampler) == len(sampler.data_source) == len(loader.dataset)
    return is_random if gives_each and not (is_random and sampler.replacement) else None


def _options(loader: Any) -> dict[str, Any]:
    return {
        name: getattr(loader, name)
        for name in (
            "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
            "generator", "prefetch_factor", "persistent_workers", "in_order",
        )
    }  # fmt: skip


def _function(cost: Cost | None) -> Callable[[Any], float] | None:
    return cost if cost is None or callable(cost) else cost.__getitem__


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None


def _same(batch: Any) -> Any:
    return batch
