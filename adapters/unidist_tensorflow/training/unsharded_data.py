"""A warning if every rank is about to train on all of the data, told from the data itself in one small exchange."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
from typing import Any

import numpy as np
import tensorflow as tf

from unidist.mesh import DATA_AXIS
from unidist.negotiation import allgather_object
from unidist.runtime import context

_log = logging.getLogger("unidist.training")

_NUM_ROWS = 16
"""Rows of an array that are compared, evenly spread: a share of the samples differs in one of them."""

# Transformations that cannot select samples by rank; any other might.
_TRANSPARENT = frozenset(
    f"{name}Dataset"
    for name in (
        *("AssertCardinality", "Batch", "Cache", "Map", "Options", "PaddedBatch", "ParallelBatch", "ParallelMap"),
        *("Prefetch", "Repeat", "Shuffle"),
    )
)
_COUNTED = frozenset(("TakeDataset", "SkipDataset"))
_IN_MEMORY = frozenset(("TensorSliceDataset", "TensorDataset"))


def warn_in_fit(model: Any) -> None:
    """Let the first `fit` of `model` warn, on rank 0, if the ranks of the data axis train on the same samples.

    Only data that can be compared without reading it is looked at: arrays, and datasets of arrays in memory. With
    `steps_per_epoch` nothing is said: each rank may draw samples at random, as Horovod's examples do.
    """
    plain = model.fit
    before = {name: value for name, value in vars(model).items() if name == "fit"}

    @functools.wraps(plain)
    def fit(*args: Any, **options: Any) -> Any:
        given = inspect.signature(plain).bind(*args, **options).arguments
        model.__dict__.pop("fit")
        model.__dict__.update(before)
        _compare(given.get("x"), samples_at_random=given.get("steps_per_epoch") is not None)
        return plain(*args, **options)

    if context.current().axis_size(DATA_AXIS) > 1:
        model.fit = fit


def _compare(data: Any, *, samples_at_random: bool) -> None:
    """Compare what identifies the data over the ranks. Collective."""
    runtime = context.current()
    own = None if samples_at_random else fingerprint(data)
    everyone = allgather_object(runtime.negotiator, own, name="unidist.fit.data")
    if runtime.topology.rank == 0 and own is not None and set(everyone) == {own}:
        size = runtime.axis_size(DATA_AXIS)
        _log.warning(
            "fit trains on the same data on all %d ranks of the data axis: each of them goes through all samples, so "
            "%d ranks do the same work. Give each its share: model.fit(ud.shard(dataset, batch_size=...)), with "
            "tf.data.Dataset.from_tensor_slices((x, y)) for arrays",
            *(size, size),
        )


def fingerprint(data: Any) -> str | None:
    """Return what is equal for equal samples: a hash of shapes and of some rows; None if that cannot be told.

    Args:
        data: the first argument of `fit`.
    """
    digest = hashlib.blake2b(digest_size=16)
    return digest.hexdigest() if _add(digest, data) else None


def _add(digest: Any, data: Any) -> bool:
    """Add the data to the hash; returns False where that is not possible."""
    if isinstance(data, tf.data.Dataset):
        return _add_dataset(digest, data)
    leaves = tf.nest.flatten(data)
    return bool(leaves) and all(_add_array(digest, leaf) for leaf in leaves)


def _add_dataset(digest: Any, dataset: Any) -> bool:
    kind = type(dataset).__name__.lstrip("_")
    if kind in _IN_MEMORY:
        return _add(digest, getattr(dataset, "_tensors", None))
    if kind in _COUNTED:
        if not _add_array(digest, getattr(dataset, "_count", None)):
            return False
    elif kind not in _TRANSPARENT:
        return False
    digest.update(kind.encode())
    return all(_add_dataset(digest, each) for each in dataset._inputs())


def _add_array(digest: Any, array: Any) -> bool:
    if not isinstance(array, np.ndarray | tf.Tensor) or (isinstance(array, tf.Tensor) and not hasattr(array, "numpy")):
        return False
    shape = tuple(array.shape)
    digest.update(f"{shape} {array.dtype}".encode())
    last = shape[0] - 1 if shape else -1
    for row in sorted({index * last // (_NUM_ROWS - 1) for index in range(_NUM_ROWS)}) if last >= 0 else (...,):
        digest.update(np.ascontiguousarray(array[row]).tobytes())
    return True
