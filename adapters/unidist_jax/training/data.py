"""`shard` for arrays, sequences of samples, and iterables: each sample of an epoch on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from unidist.errors import UsageError
from unidist.runtime import context
from unidist.training.items import Cost, check_no_budget
from unidist.training.reading import timed
from unidist.training.sharding import Tail, check_tail, share
from unidist_arrays.numbered_samples import NumberedSamples, row_count
from unidist_arrays.token_batches import TokenBatches
from unidist_jax.elastic import ShardedArrays


def shard(
    data: Any,
    *,
    batch_size: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    tail: Tail = "pad",
    cost: Cost | None = None,
    max_tokens: float | None = None,
    window: int | None = None,
    collate: Callable[[Any], Any] | None = None,
) -> Any:
    """Return this rank's share of data. Ranks that hold parts of one model get the same samples.

    In an elastic job the arrays that `TrainStep` trains on are redistributed when ranks join or leave: each sample
    counts once in an epoch, and those that do not divide make a smaller last batch (`tail="drop"`: are left out).

        for x, y in ud.shard((features, labels), batch_size=32): ...   # arrays, one row per sample
        source = ud.shard(source)                                      # a sequence of samples: for grain's loaders
        for sample in ud.shard(stream): ...                            # any iterable, in its own order
        for x, y in ud.shard(source, cost=lengths, max_tokens=4096, collate=pad): ...  # batches of equal work

    Args:
        data: a tuple, list or dict of arrays with equally many rows, with `batch_size`; an object with `__len__` and
            `__getitem__`; or an iterable, the same on every rank.
        batch_size: samples of a batch of this rank; for arrays.
        shuffle: arrays, and sequences: in another order in each epoch (a sequence: in one order), the same on every
            rank; default: arrays yes, others no.
        seed: of that order, equal on every rank.
        tail: what happens to samples that do not divide: "pad" repeats the first ones until all shares are equal;
            "drop" leaves the last ones out; "join" distributes them, so that the first ranks have one sample more: the
            others then call `ud.join()`. An iterable ends with the last sample that all ranks have, but
            with "join". With `max_tokens` it is about batches.
        cost: with `max_tokens`: the length of each sample, such as its number of tokens, or a function of its index.
        max_tokens: of a tuple or dict of arrays, or of a sequence: a batch has samples of about one length, as many as
            there is room for: the number of samples times the longest length is at most this. A `batch_size` is the
            most samples of a batch then, and the samples are shuffled by default.
        window: with `max_tokens`, the number of samples in the order of the epoch that are sorted by length together.
            More are less padding and less chance. Default: those of about 50 batches.
        collate: with `max_tokens`: makes a batch of a list of samples, or of rows of arrays. Default: nothing is done.

    Raises:
        UsageError: arrays without a batch size or with different numbers of rows, nothing that can be divided, or an
            unknown tail; a sample is longer than `max_tokens`, or ranks have other lengths.
    """
    check_tail(tail)
    if max_tokens is not None:
        samples = NumberedSamples(data, collate, flatten=jax.tree.leaves, tree_map=jax.tree.map)
        return TokenBatches.of(
            samples,
            cost=cost,
            max_tokens=max_tokens,
            max_samples=batch_size,
            window=window,
            shuffle=shuffle is not False,
            seed=seed,
            tail=tail,
        )
    check_no_budget(cost=cost, window=window, collate=collate)
    if batch_size is not None:
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size}: give at least 1")
        if isinstance(data, Iterator) or not jax.tree.leaves(data):
            raise UsageError(
                f"shard(batch_size={batch_size}) of {_named(data)}: it divides the rows of arrays. Give a "
                "tuple, list or dict of arrays; of an iterable, leave batch_size= out and make batches yourself"
            )
        chosen = True if shuffle is None else shuffle
        return ShardedArrays(
            data, row_count(jax.tree.leaves(data)), batch_size=batch_size, shuffle=chosen, seed=seed, tail=tail
        )
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        if _is_tree_of_arrays(data):
            raise UsageError("shard() of arrays makes batches: give batch_size=, the samples of a batch of this rank")
        return ShardedSource(data, shuffle=bool(shuffle), seed=seed, tail=tail)
    if not isinstance(data, Iterable):
        raise UsageError(
            f"shard() of {_named(data)}: give arrays with a batch_size, an object with __len__ and "
            "__getitem__, or an iterable of samples"
        )
    if shuffle:
        raise UsageError("an iterable cannot be shuffled by shard(); shuffle it yourself, the same way on every rank")
    return timed(_every(data, tail))


class ShardedSource(Sequence[Any]):
    """This rank's share of a sequence of samples, a random-access source for grain. Made by `shard`."""

    def __init__(self, source: Any, *, shuffle: bool, seed: int, tail: Tail) -> None:
        rank, size = context.current().data_place()
        self._source = source
        self._rows = share(len(source), rank=rank, size=size, seed=seed, epoch=0, shuffle=shuffle, tail=tail)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._source[row] for row in self._rows[index]]
        return self._source[self._rows[index]]


def _every(data: Iterable[Any], tail: Tail) -> Iterator[Any]:
    rank, size = context.current().data_place()
    if tail == "join":
        yield from itertools.islice(data, rank, None, size)
        return
    samples = iter(data)
    while len(row := list(itertools.islice(samples, size))) == size:
        yield row[rank]


def _named(data: Any) -> str:
    return f"a {type(data).__name__} (rank {context.current().topology.rank})"


def _is_tree_of_arrays(data: Any) -> bool:
    leaves = jax.tree.leaves(data)
    return bool(leaves) and all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves)
