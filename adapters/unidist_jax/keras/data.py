"""`shard` for Keras on JAX: batches that `fit` takes."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import keras
import numpy as np

from unidist.errors import UsageError
from unidist.training.sharding import Tail
from unidist_jax.training.data import shard as shard_any
from unidist_keras.unsharded_data import add_rows


class ShardedBatches(keras.utils.PyDataset):
    """Batches of this rank's share of arrays, for `fit` and for loops; each iteration is an epoch. Made by `shard`.

    `fit` gets them in their own order, which differs from epoch to epoch, also with `fit(shuffle=True)`: a smaller last
    batch is the last one on every rank.

    Args:
        arrays: this rank's share of arrays, as `unidist.jax.shard` returns it.
    """

    def __init__(self, arrays: Any) -> None:
        super().__init__()
        self._arrays = arrays
        self._epoch: Any = iter(())
        self._given = 0

    def __len__(self) -> int:
        return len(self._arrays)

    def __iter__(self) -> Any:
        return iter(self._arrays)

    def __getitem__(self, index: int) -> Any:
        """Return the next batch of the epoch, whichever is asked for."""
        if self._given in (0, len(self)):
            self._begin()
        self._given += 1
        return next(self._epoch)

    def _begin(self) -> None:
        self._epoch, self._given = iter(self._arrays), 0

    def on_epoch_end(self) -> None:
        """Go on with the next epoch; what `fit` has read to build a model comes again."""
        if 0 < self._given < len(self):
            self._arrays.set_epoch(self._arrays.epoch - 1)
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
) -> Any:
    """Return this rank's share of data.

        model.fit(ud.shard((features, labels), batch_size=32))

    Args:
        data: a tuple or dict of arrays, as `fit` takes them, with `batch_size`; a sequence of samples (for a loader of
            grain's or PyTorch's), or an iterable, see `unidist.jax.shard`.
        batch_size: samples of a batch of this rank; for arrays.
        shuffle: arrays, and sequences: in another order in each epoch (a sequence: in one order), the same on every
            rank; default: arrays yes, others no.
        seed: of that order, equal on every rank.
        tail: what happens to samples that do not divide; see `unidist.jax.shard`.

    Raises:
        UsageError: arrays without a batch size or with different numbers of rows, a tf.data.Dataset, or an unknown
            tail.
    """
    if type(data).__module__.partition(".")[0] == "tensorflow":
        raise UsageError(
            f"shard of a {type(data).__name__}: where Keras runs on JAX, give arrays (ud.shard((x, y), batch_size=32)) "
            "or a sequence of samples"
        )
    dealt = shard_any(data, batch_size=batch_size, shuffle=shuffle, seed=seed, tail=tail)
    return dealt if batch_size is None else ShardedBatches(dealt)
