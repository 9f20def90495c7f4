"""A warning if every rank is about to train on all of the data, told from the data itself in one small exchange."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from unidist.mesh import SAMPLE_AXES
from unidist.negotiation import allgather_object
from unidist.runtime import context
from unidist_arrays.memory import Array

__all__ = ["add_rows", "warn_in_fit"]

_log = logging.getLogger("unidist.training")

_NUM_ROWS = 16
"""Rows of an array that are compared, evenly spread: a share of the samples differs in one of them."""


def warn_in_fit(model: Any, fingerprint: Callable[[Any], str | None]) -> None:
    """Let the first `fit` of `model` warn, on rank 0, if the ranks of the data axis train on the same samples.

    With `steps_per_epoch` nothing is said: each rank may draw samples at random, as Horovod's examples do.

    Args:
        model: of Keras.
        fingerprint: returns what is equal for equal samples, given the first argument of `fit`; None if that cannot be
            told.
    """
    plain = model.fit
    before = {name: value for name, value in vars(model).items() if name == "fit"}

    @functools.wraps(plain)
    def fit(*args: Any, **options: Any) -> Any:
        given = inspect.signature(plain).bind(*args, **options).arguments
        model.__dict__.pop("fit")
        model.__dict__.update(before)
        _compare(None if given.get("steps_per_epoch") is not None else fingerprint(given.get("x")))
        return plain(*args, **options)

    if context.current().axis_size(SAMPLE_AXES) > 1:
        model.fit = fit


def _compare(own: str | None) -> None:
    """Compare what identifies the data over the ranks. Collective."""
    runtime = context.current()
    everyone = allgather_object(runtime.negotiator, own, name="unidist.fit.data")
    if runtime.topology.rank == 0 and own is not None and set(everyone) == {own}:
        size = runtime.axis_size(SAMPLE_AXES)
        _log.warning(
            "fit trains on the same data on all %d ranks of the data axis: each of them goes through all samples, so "
            "%d ranks do the same work. Give each its share: model.fit(ud.shard((x, y), batch_size=...))",
            *(size, size),
        )


def add_rows(digest: Any, array: Array) -> None:
    """Add shape, type and some rows of an array to a hash."""
    shape = tuple(array.shape)
    digest.update(f"{shape} {array.dtype}".encode())
    last = shape[0] - 1 if shape else -1
    for row in sorted({index * last // (_NUM_ROWS - 1) for index in range(_NUM_ROWS)}) if last >= 0 else (...,):
        digest.update(np.ascontiguousarray(array[row]).tobytes())
