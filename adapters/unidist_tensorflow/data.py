"""`shard` for tf.data: each sample of an epoch on one rank."""

from __future__ import annotations

import tensorflow as tf

from unidist import context
from unidist.errors import UsageError
from unidist.mesh import DATA_AXIS
from unidist.sharding import Tail, check_tail


def shard(
    dataset: tf.data.Dataset,
    *,
    shuffle: bool = True,
    seed: int = 0,
    tail: Tail = "pad",
    buffer_size: int | None = None,
) -> tf.data.Dataset:
    """Return this rank's share of a dataset of single samples; batch it afterwards.

    Ranks that hold parts of one model (along the axes `pipeline` and `tensor`) get the same samples.
    Every epoch (every iteration over the result) the samples are dealt out anew; ranks iterate equally often.

        dataset = ud.shard(tf.data.Dataset.from_tensor_slices((x, y))).batch(32)

    Args:
        dataset: the same samples in the same order on every rank.
        shuffle: in another order in each epoch, the same on every rank.
        seed: equal on every rank.
        tail: what happens to samples that do not divide: "pad" repeats the first ones of the dataset until all shares
            are equal; "drop" leaves the last ones of the epoch out; "join" deals them out, so that the first ranks
            have one sample more: the others then call `ud.join()` (or `fit` with `steps_per_epoch`).
        buffer_size: samples that are held in memory for shuffling; default: all, which mixes best.

    Raises:
        UsageError: an unknown tail, or a dataset of unknown length where that matters.
    """
    check_tail(tail)
    runtime = context.current()
    size, rank = runtime.axis_size(DATA_AXIS), runtime.axis_rank(DATA_AXIS)
    count = int(dataset.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        raise UsageError("this dataset repeats for ever: shard it before repeat(), or there are no epochs to deal out")
    if count < 0 and (tail != "join" or (shuffle and buffer_size is None)):
        raise UsageError(
            f"the length of this dataset is not known, which shard(tail={tail!r}, shuffle={shuffle}) needs. Say it "
            "with dataset.apply(tf.data.experimental.assert_cardinality(n)), or use tail='join' and a buffer_size"
        )
    dealt = dataset
    if shuffle and count != 0:
        dealt = dealt.shuffle(buffer_size or count, seed=seed, reshuffle_each_iteration=True)
    if tail == "pad" and count % size:
        dealt = dealt.concatenate(dataset.repeat().take(-count % size))
    elif tail == "drop":
        dealt = dealt.take(count - count % size)
    return dealt.shard(size, rank)
