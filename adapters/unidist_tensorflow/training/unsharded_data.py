"""A warning if every rank is about to train on all of the data, told from the data itself in one small exchange."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from unidist_keras import unsharded_data

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

    Only data that can be compared without reading it is looked at: arrays, and datasets of arrays in memory.
    """
    unsharded_data.warn_in_fit(model, fingerprint)


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
    unsharded_data.add_rows(digest, array)
    return True
