"""`shard` for Keras on JAX: batches that `fit` takes."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from typing_extensions import override

from unidist.elastic.batches import BatchShare, Position, SampleOrder
from unidist.elastic.step_training import Progress, Redistributable
from unidist.errors import UsageError
from unidist.runtime import context
from unidist.training.items import Cost
from unidist.training.sharding import Tail
from unidist_arrays.token_batches import EqualEpochs, TokenBatches
from unidist_jax.elastic import ShardedArrays
from unidist_jax.training.data import shard as shard_any
from unidist_keras.unsharded_data import add_rows


class ElasticBatches(Redistributable):
    """Batches of arrays that are redistributed when ranks join or leave, for `fit` in an elastic job.

    Args:
        arrays: a tree of arrays with one row per sample.
        order: of the samples.
        batch_size: samples of a batch of a rank.
    """

    def __init__(self, arrays: Any, order: SampleOrder, batch_size: int) -> None:
        self.order = order
        self.batch_size: int = batch_size
        self._arrays = arrays
        self._progress: Callable[[], Progress] | None = None
        self._shares: Iterator[BatchShare] = iter(())
        self._expected: Any = None

    @override
    def follow(self, progress: Callable[[], Progress]) -> None:
        self._progress = progress

    @override
    def take_share(self) -> BatchShare | None:
        """Return this rank's share of the step that progress calls for."""
        assert self._progress is not None, "somebody trains on it"
        now, place = self._progress(), context.current().topology
        state = (now.position, now.global_batch, place.rank, place.world_size)
        if state != self._expected:
            self._shares = self.order.shares(
                now.position, rank=place.rank, size=place.world_size, global_batch=now.global_batch
            )
        found = next(self._shares)
        is_end = found.following.epoch > now.position.epoch
        self._expected = None if is_end else (found.following, *state[1:])
        return found

    def take_share_alone(self) -> BatchShare:
        """Return the first batch of a single rank, to try a step with. Changes no progress."""
        return next(self.order.shares(Position(), rank=0, size=1, global_batch=self.batch_size))

    def batch(self, rows: Sequence[int]) -> Any:
        """Return the samples in these rows, a tree like the arrays."""
        return jax.tree.map(operator.itemgetter(np.asarray(rows, np.int64)), self._arrays)


class ShardedBatches(keras.utils.PyDataset):
    """Batches of this rank's share of data, for `fit` and for loops; each iteration is an epoch. Made by `shard`.

    `fit` gets them in their own order, which differs from epoch to epoch, also with `fit(shuffle=True)`: a smaller last
    batch is the last one on every rank.

    Args:
        batches: this rank's, as `unidist.jax.shard` returns them of arrays, or with as many in each epoch.
        elastic: the batches for elastic jobs; None: these cannot be redistributed.
    """

    def __init__(self, batches: ShardedArrays | EqualEpochs, elastic: ElasticBatches | None = None) -> None:
        super().__init__()
        self._batches = batches
        self.elastic = elastic
        self._epoch: Any = iter(())
        self._given = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Any:
        return iter(self._batches)

    def __getitem__(self, index: int) -> Any:
        """Return the next batch of the epoch, whichever is asked for."""
        if self._given in (0, len(self)):
            self._begin()
        self._given += 1
        return next(self._epoch)

    def _begin(self) -> None:
        self._epoch, self._given = iter(self._batches), 0

    def on_epoch_end(self) -> None:
        """Go on with the next epoch; what `fit` has read to build a model comes again."""
        if 0 < self._given < len(self):
            self._batches.set_epoch(self._batches.epoch - 1)
        self._given = 0


def fingerprint(data: Any) -> str | None:
    """Return what is equal for equal arrays: a hash of shapes and of some rows; None for what is no array.

    Args:
        data: the first argument of `fit`.
    """
    digest = hashlib.blake2b(digest_size=16)
    leaves = jax.tree.leaves(data)
    if not leaves or not all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves):
        return None
    for leaf in leaves:
        add_rows(digest, np.asarray(leaf))
    return digest.hexdigest()


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
    """Return this rank's share of data.

        model.fit(ud.shard((features, labels), batch_size=32))
        model.fit(ud.shard(samples, cost=lengths, max_tokens=4096, collate=pad))  # batches of equal work

    Args:
        data: a tuple or dict of arrays, as `fit` takes them, with `batch_size`; a sequence of samples (for a loader of
            grain's or PyTorch's), or an iterable, see `unidist.jax.shard`.
        batch_size: samples of a batch of this rank; for arrays.
        shuffle: arrays, and sequences: in another order in each epoch (a sequence: in one order), the same on every
            rank; default: arrays yes, others no.
        seed: of that order, equal on every rank.
        tail: what happens to samples that do not divide; see `unidist.jax.shard`. "join" does not go with `max_tokens`.
        cost: the length of each sample, with `max_tokens`.
        max_tokens: number of samples of a batch times the length of the longest one, at most; see `unidist.jax.shard`.
            Every epoch has as many batches as the first one, see docs/data.md.
        window: number of samples that are sorted by length together, with `max_tokens`.
        collate: makes a batch as `fit` takes it of a list of samples, or of rows of arrays; with `max_tokens`.

    Raises:
        UsageError: arrays without a batch size or with different numbers of rows, a tf.data.Dataset, or an unknown
            tail.
    """
    if type(data).__module__.partition(".")[0] == "tensorflow":
        raise UsageError(
            f"shard of a {type(data).__name__}: where Keras runs on JAX, give arrays (ud.shard((x, y), batch_size=32)) "
            "or a sequence of samples"
        )
    budget: dict[str, Any] = {"cost": cost, "max_tokens": max_tokens, "window": window, "collate": collate}
    dealt = shard_any(data, batch_size=batch_size, shuffle=shuffle, seed=seed, tail=tail, **budget)
    if isinstance(dealt, TokenBatches):
        return ShardedBatches(EqualEpochs(dealt, tail=tail))
    if isinstance(dealt, ShardedArrays):
        return ShardedBatches(dealt, ElasticBatches(data, dealt.order, dealt.batch_size))
    return dealt
