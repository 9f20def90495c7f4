"""Gradients of parameters that several ranks hold, such as an embedding that is the output layer too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unidist_arrays.memory import buffer_of_array, empty_array
from unidist_jax.memory import array_of, jax_array
from unidist_pipeline.execution.rank import PipelineRank


class TiedGradients:
    """Adds up gradients over the ranks that hold a parameter. Creation is collective over the pipeline.

    Args:
        rank: of the pipeline.
        holders: the ranks of the pipeline that hold a parameter, by place; the same on every rank.
    """

    def __init__(self, rank: PipelineRank, holders: Mapping[int, Sequence[int]]) -> None:
        self._groups = rank.subgroups.of_holders(rank.communicator, holders.items())

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
