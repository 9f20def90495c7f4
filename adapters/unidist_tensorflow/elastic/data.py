"""A tf.data dataset whose samples are redistributed when ranks join or leave: `shard` returns it in elastic jobs.

tf.data goes through samples in one order, so this does not pick samples by their numbers: when an iteration begins, it
looks up the progress of training and the present ranks, skips the samples that are done, and takes every n-th of the
rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from unidist.elastic.batches import BatchShare, Position, SampleOrder
from unidist.elastic.step_training import Progress, Redistributable, sample_place
from unidist.mesh import SAMPLE_AXES
from unidist.runtime import context
from unidist_tensorflow.elastic.shuffling import shuffle_identically
from unidist_tensorflow.memory import Array

_ATTRIBUTE = "_unidist_elastic"


class ElasticDataset(Redistributable):
    """The samples of a dataset, in this rank's shares of global batches.

    Until `fit` of an elastic job trains on it, each iteration is a separate epoch, divided over the ranks that are
    present when it begins.

    Args:
        samples: the same in the same order on every rank.
        order: how many, and whether to shuffle them; the order itself is tf.data's.
        batch_size: samples of a rank, of the global batch at the beginning.
        buffer_size: samples that are held in memory for shuffling.

    Attributes:
        dataset: of this rank's batches.
        shares_per_take: steps that `take_share` joins, as Keras' `steps_per_execution` does.
    """

    def __init__(self, samples: tf.data.Dataset, order: SampleOrder, batch_size: int, buffer_size: int) -> None:
        self.order, self.batch_size = order, batch_size
        self.shares_per_take = 1
        self._samples, self._buffer_size = samples, buffer_size
        self._iterations = 0
        self._progress: Callable[[], Progress] | None = None
        self._shares: Iterator[BatchShare] = iter(())
        self._expected: Any = None
        self._taken: deque[BatchShare] = deque()
        self._is_moved = True
        self.dataset = tf.data.Dataset.range(1).flat_map(self._epoch)
        setattr(self.dataset, _ATTRIBUTE, self)

    @override
    def follow(self, progress: Callable[[], Progress]) -> None:
        self._progress = progress

    @override
    def take_share(self) -> BatchShare | None:
        """Return the next batches, joined to one of all their samples."""
        assert self._progress is not None, "somebody trains on it"
        now, (rank, size) = self._progress(), sample_place(context.current())
        state = (now.position, now.global_batch, rank, size)
        if state != self._expected:
            self._shares = self._shares_from(now.position, now.global_batch, rank, size)
            self._is_moved = True
        self._taken = deque(islice(self._shares, self.shares_per_take))
        first, last = self._taken[0], self._taken[-1]
        is_end = last.following.epoch > now.position.epoch
        self._expected = None if is_end else (last.following, *state[1:])
        return replace(first, following=last.following, total=sum(share.total for share in self._taken))

    def take_share_alone(self) -> BatchShare:
        """Return the first batch of a single rank, to try a step with. Changes no progress."""
        assert self.batch_size is not None, "given"
        self._taken = deque([next(self._shares_from(Position(), self.batch_size, 0, 1))])
        return self._taken[0]

    def next_share(self) -> BatchShare:
        """Return the next of the batches that the last `take_share` has joined."""
        return self._taken.popleft()

    @property
    def has_moved(self) -> bool:
        """Say, once, that a new iteration over the dataset must begin, because the present one yields other samples."""
        moved, self._is_moved = self._is_moved, False
        return moved

    def _shares_from(self, position: Position, global_batch: int, rank: int, size: int) -> Iterator[BatchShare]:
        in_order = replace(self.order, shuffle=False)  # which samples they are, is tf.data's
        return in_order.shares(position, rank=rank, size=size, global_batch=global_batch)

    def _place(self) -> Array:
        """Return the state of an iteration that begins: epoch, samples that are done, rank, size, global batch."""
        runtime = context.current()
        rank, size = runtime.axis_rank(SAMPLE_AXES), runtime.axis_size(SAMPLE_AXES)
        if self._progress is not None:
            now = self._progress()
            found = (now.position.epoch, now.position.processed, rank, size, now.global_batch)
        else:
            assert self.batch_size is not None, "given"
            found = (self._iterations, 0, rank, size, self.batch_size * size)
            self._iterations += 1
        return np.array(found, np.int64)

    def _epoch(self, _: tf.Tensor) -> tf.data.Dataset:
        place = tf.numpy_function(self._place, [], tf.int64)
        place.set_shape([5])
        # tf.data's optimizer crashes where skip takes what is not the first result of its node.
        epoch, processed, rank, size, whole = (tf.identity(number) for number in tf.unstack(place))
        samples, length = self._samples, tf.constant(self.order.count, tf.int64)
        if self.order.shuffle:
            samples = shuffle_identically(samples, buffer_size=self._buffer_size, seed=self.order.seed + epoch)
        if self.order.drop_last:
            length -= length % whole

        def share(*samples: Any) -> Any:
            """Return this rank's samples of a global batch; one sample that does not count if it has none."""
            total = tf.shape(tf.nest.flatten(samples)[0], tf.int64)[0]
            own = tf.range(tf.minimum(rank, total - 1), total, size)
            found = tf.nest.map_structure(lambda each: tf.gather(each, own), samples)
            return found if len(found) > 1 else found[0]

        return samples.take(length).skip(processed).batch(whole).map(share)


def elastic_dataset_of(dataset: Any) -> ElasticDataset | None:
    """Return the elastic dataset that a dataset is derived from, by any transformations; None if there is none."""
    if not isinstance(dataset, tf.data.Dataset):
        return None
    own: ElasticDataset | None = getattr(dataset, _ATTRIBUTE, None)
    if own is not None:
        return own
    return next((data for each in dataset._inputs() if (data := elastic_dataset_of(each)) is not None), None)
