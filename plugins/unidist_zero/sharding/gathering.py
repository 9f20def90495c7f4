"""All values of a model whose parameters are divided over ranks, for a while and on request. Knows no framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

ModelT = TypeVar("ModelT")


class GathersParameters(ABC):
    """Power of what a model carries: it can give every rank all values for a while."""

    @abstractmethod
    def gathered(self) -> AbstractContextManager[Any]:
        """See the function `gathered`."""


@contextmanager
def gathered(model: ModelT) -> Iterator[ModelT]:
    """Let every rank hold all values of the model's parameters, which `zero=3` divides, within a `with` block.

        with unidist_zero.gathered(model):
            if ud.rank() == 0:
                model.save_weights("model.weights.h5")

    Collective, at its beginning and its end; not within a graph. What the script assigns to parameters is kept, and
    must be equal on all ranks. A model that is not divided is left as it is.
    """
    from unidist.checkpoint.format.interface import CARRIED

    carried = getattr(model, CARRIED, None)  # a wrapper, as torch.compile makes one, has what it wraps
    if not isinstance(carried, GathersParameters):
        yield model
        return
    with carried.gathered():
        yield model
