"""Whole values of a sharded model on every rank, for a while and on request. Knows no framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

ModelT = TypeVar("ModelT")


class GathersParameters(ABC):
    """Capability of the object attached to a model: gives every rank all values for a while."""

    @abstractmethod
    def gathered(self) -> AbstractContextManager[Any]:
        """See the function `gathered`."""


@contextmanager
def gathered(model: ModelT) -> Iterator[ModelT]:
    """Give every rank all values of the parameters that `zero=3` shards, within a `with` block.

        with unidist_zero.gathered(model):
            if ud.rank() == 0:
                model.save_weights("model.weights.h5")

    Collective on entry and on exit; not allowed within a graph. What the script assigns to parameters is kept, and must
    be equal on all ranks. A model that is not sharded is left as it is.
    """
    from unidist.checkpoint.format.interface import STATE_ATTRIBUTE

    attached = getattr(model, STATE_ATTRIBUTE, None)  # a wrapper, as torch.compile makes one, has what it wraps
    if not isinstance(attached, GathersParameters):
        yield model
        return
    with attached.gathered():
        yield model
