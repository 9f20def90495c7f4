"""Gradients of parameters that several ranks hold, such as an embedding that is the output layer too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unidist.communicator import Communicator
from unidist.runtime_api import RuntimeAPI
from unidist_arrays.memory import buffer_of_array, empty_array
from unidist_jax.memory import array_of, jax_array


class _Groups:
    """Communicators made by `TiedGradients`, to be closed with the runtime."""

    def __init__(self, context: RuntimeAPI) -> None:
        self.made: list[Communicator] = []

    def close(self) -> None:
        for group in self.made:
            group.close()


class TiedGradients:
    """Adds up gradients over the ranks that hold a parameter. Creation is collective over the pipeline.

    Args:
        context: the runtime, which closes the communicators made here.
        communicator: along the pipeline.
        holders: the ranks of the pipeline that hold a parameter, by place; the same on every rank.
    """

    def __init__(self, context: RuntimeAPI, communicator: Communicator, holders: Mapping[int, Sequence[int]]) -> None:
        owned = context.owned(_Groups)
        places: dict[tuple[int, ...], list[int]] = {}
        for place, ranks in holders.items():
            if len(ranks) > 1:
                places.setdefault(tuple(ranks), []).append(place)
        self._groups: list[tuple[Communicator, list[int]]] = []
        for ranks, shared in places.items():
            group = communicator.split(ranks if communicator.rank in ranks else ())
            if group is not None:
                owned.made.append(group)
                self._groups.append((group, shared))

    def add_up(self, gradients: dict[int, Any]) -> None:
        """Replace the gradients of tied parameters by their sums. Collective over the ranks that hold them."""
        for group, places in self._groups:
            for place in places:
                own = array_of(gradients[place])
                total = empty_array(own.shape, own.dtype)
                np.copyto(total, own)
                buffer = buffer_of_array(total)
                group.allreduce(buffer, buffer).wait()
                gradients[place] = jax_array(total)
