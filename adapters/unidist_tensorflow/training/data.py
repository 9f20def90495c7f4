"""`shard` for tf.data: each sample of an epoch on one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from unidist.elastic.batches import SampleOrder
from unidist.errors import UsageError
from unidist.runtime import context
from unidist.training.items import Cost, check_no_budget
from unidist.training.sharding import Tail, check_tail
from unidist_arrays.numbered_samples import NumberedSamples
from unidist_arrays.token_batches import EqualEpochs, TokenBatches
from unidist_tensorflow.elastic.data import ElasticDataset
from unidist_tensorflow.elastic.shuffling import reshuffled
from unidist_tensorflow.training.waiting import measured


def shard(
    dataset: Any,
    *,
    shuffle: bool = True,
    seed: int = 0,
    tail: Tail = "pad",
    buffer_size: int | None = None,
    batch_size: int | None = None,
    cost: Cost | None = None,
    max_tokens: float | None = None,
    window: int | None = None,
    collate: Callable[[Any], Any] | None = None,
) -> tf.data.Dataset:
    """Return this rank's share of a dataset of single samples, in batches where `batch_size` says so; else batch it.

    Arrays with one row per sample are a dataset, too: `ud.shard((x, y), batch_size=32)`.

    Ranks that hold parts of one model (along the axes `pipeline` and `tensor`) get the same samples.
    Every epoch (every iteration over the result) divides the samples again; ranks iterate equally often.

        dataset = ud.shard(tf.data.Dataset.from_tensor_slices((x, y)), batch_size=32)
        dataset = ud.shard(samples, cost=lengths, max_tokens=4096, collate=pad)  # batches of equal work

    In an elastic job, batched samples can be redistributed when ranks join or leave, and `fit` of a distributed model
    does so: each sample counts once in an epoch, and those that do not divide make a smaller last batch
    (`tail="drop"`: are left out). The number of batches then depends on the ranks, so the dataset has no length.
    Custom loops under `ud.elastic.run` divide samples themselves: a process that joins later counts other epochs.

    Args:
        dataset: a tf.data.Dataset, or a tuple or dict of arrays; the same samples in the same order on every rank.
            With `max_tokens` arrays, or a sequence of samples: an object with `__len__` and `__getitem__`.
        shuffle: in another order in each epoch, the same on every rank.
        seed: equal on every rank.
        tail: what happens to samples that do not divide: "pad" repeats the first ones of the dataset until all shares
            are equal; "drop" leaves the last ones of the epoch out; "join" distributes them, so that the first ranks
            have one sample more: the others then call `ud.join()` (or `fit` with `steps_per_epoch`).
        buffer_size: samples that are held in memory for shuffling; default: all, which mixes best.
        batch_size: samples of a batch of this rank; with `max_tokens` the most.
        cost: with `max_tokens`: the length of each sample, such as its number of tokens, or a function of its index.
        max_tokens: a batch has samples of about one length, as many as there is room for: the number of samples times
            the longest length is at most this. Every epoch has as many batches as the first one, see docs/data.md.
        window: with `max_tokens`, the number of samples in the order of the epoch that are sorted by length together.
            More are less padding and less chance. Default: those of about 50 batches.
        collate: with `max_tokens`: makes a batch of a list of samples, or of rows of arrays.

    Raises:
        UsageError: an unknown tail, neither a dataset nor arrays, or a dataset of unknown length where that matters; a
            tf.data.Dataset with `max_tokens`, a sample that is longer, or ranks that have other lengths.
    """
    check_tail(tail)
    if max_tokens is not None:
        if buffer_size is not None:
            raise UsageError(
                f"shard(max_tokens=, buffer_size={buffer_size}): give window=, the samples of a sort, instead"
            )
        batches = TokenBatches.of(
            _numbered(dataset, collate),
            cost=cost,
            max_tokens=max_tokens,
            max_samples=batch_size,
            window=window,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
        )
        return measured(_generated(batches, EqualEpochs(batches, tail=tail)))
    check_no_budget(cost=cost, window=window, collate=collate)
    if not isinstance(dataset, tf.data.Dataset):
        dataset = _dataset_of(dataset)
    runtime = context.current()
    rank, size = runtime.data_place()
    count = int(dataset.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        raise UsageError("this dataset repeats for ever: shard it before repeat(), or there are no epochs to divide")
    if count < 0 and (tail != "join" or (shuffle and buffer_size is None)):
        raise UsageError(
            f"the length of this dataset is not known, which shard(tail={tail!r}, shuffle={shuffle}) needs. Say it "
            "with dataset.apply(tf.data.experimental.assert_cardinality(n)), or use tail='join' and a buffer_size"
        )
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch_size={batch_size}: give at least 1")
    if batch_size is not None and runtime.membership is not None:
        if count < 0:
            raise UsageError(
                "the length of this dataset is not known, and an elastic job redistributes its samples by "
                "number: say it with dataset.apply(tf.data.experimental.assert_cardinality(n))"
            )
        order = SampleOrder(count, seed, shuffle, drop_last=tail == "drop")
        return ElasticDataset(dataset, order, batch_size, buffer_size or max(count, 1)).dataset
    dealt = dataset
    if shuffle and count != 0:
        dealt = reshuffled(dealt, buffer_size=buffer_size or count, seed=seed)
    if tail == "pad" and count % size:
        dealt = dealt.concatenate(dataset.repeat().take(-count % size))
    elif tail == "drop":
        dealt = dealt.take(count - count % size)
    dealt = dealt.shard(size, rank)
    return measured(dealt if batch_size is None else dealt.batch(batch_size))


def _numbered(data: Any, collate: Callable[[Any], Any] | None) -> NumberedSamples:
    if isinstance(data, tf.data.Dataset):
        raise UsageError(
            "shard(max_tokens=) of a tf.data.Dataset, which is read in one order: such batches pick samples by their "
            "length. Give a list of its samples (list(dataset.as_numpy_iterator())) or arrays, and collate=. Or use "
            "ud.shard(dataset) without max_tokens, and its bucket_by_sequence_length(...) behind it"
        )
    if isinstance(data, tuple | dict | tf.Tensor):
        data = tf.nest.map_structure(lambda leaf: leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf, data)
    return NumberedSamples(data, collate, flatten=tf.nest.flatten, tree_map=tf.nest.map_structure)


def _generated(batches: TokenBatches, epochs: EqualEpochs) -> tf.data.Dataset:
    """Return a dataset of these batches; each iteration over it is an epoch."""
    shortest, longest = (_tensors(batches.samples.batch([index])) for index in batches.extremes())
    lock = threading.Lock()

    def epoch() -> Iterator[Any]:
        with lock:  # threads of tf.data begin iterations
            taken = epochs.take()
        return (_tensors(epochs.batch(indices)) for indices in taken)

    signature = tf.nest.map_structure(_spec, shortest, longest)
    made = tf.data.Dataset.from_generator(epoch, output_signature=signature)
    return made.apply(tf.data.experimental.assert_cardinality(len(epochs)))


def _tensors(batch: Any) -> Any:
    return tf.nest.map_structure(tf.convert_to_tensor, tuple(batch) if isinstance(batch, list) else batch)


def _spec(one: tf.Tensor, other: tf.Tensor) -> tf.TensorSpec:
    """Return what batches of any samples have in common."""
    dims = [size if size == also else None for size, also in zip(one.shape, other.shape, strict=True)]
    return tf.TensorSpec([None, *dims[1:]] if dims else dims, one.dtype)


def _dataset_of(arrays: Any) -> tf.data.Dataset:
    """Return the rows of arrays as a dataset."""
    rank, kind = context.current().topology.rank, type(arrays).__name__
    if isinstance(arrays, Iterator):
        raise UsageError(
            f"shard() of a {kind} (rank {rank}): it can be read once, and every epoch is divided again. Give "
            "tf.data.Dataset.from_generator(function, output_signature=...), with a function that returns it, and say "
            "its length with .apply(tf.data.experimental.assert_cardinality(n))"
        )
    try:
        return tf.data.Dataset.from_tensor_slices(arrays)
    except (TypeError, ValueError) as exc:
        raise UsageError(
            f"shard() of a {kind} (rank {rank}): give a tf.data.Dataset, or a tuple or dict of arrays with one row for "
            f"each sample. TensorFlow says: {_first_line(exc)}"
        ) from exc


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
