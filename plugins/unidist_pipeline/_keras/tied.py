"""Variables that several stages use: their gradients are added up over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from unidist_pipeline.execution.rank import PipelineRank
from unidist_tensorflow.memory import NUMPY_DTYPES, array_of, buffer_of_array, dtype_of, empty_array, tensor_of_array


class TiedVariables:
    """The tied variables of this rank. Creation is collective over the pipeline.

    Args:
        rank: of the pipeline.
        tied: for each tied variable of the model, in the same order on all ranks: the ranks that hold it, and the
            variable, of which only these ranks have the value.
    """

    def __init__(self, rank: PipelineRank, tied: Sequence[tuple[Sequence[int], Any]]) -> None:
        self._groups = rank.subgroups.of_holders(rank.communicator, [(variable, ranks) for ranks, variable in tied])

    def add_up(self, gradients: dict[int, Any]) -> None:
        """Replace the gradients of tied variables, by id, by their sums. Collective over the ranks that hold them."""
        for group, variables in self._groups:
            for variable in variables:
                own = gradients.get(id(variable))
                if own is None:
                    summed = empty_array(tuple(variable.shape), NUMPY_DTYPES[dtype_of(variable)])
                    summed.fill(0)
                else:
                    given = array_of(tf.convert_to_tensor(own))
                    summed = empty_array(given.shape, given.dtype)
                    np.copyto(summed, given)
                buffer = buffer_of_array(summed)
                group.allreduce(buffer, buffer).wait()
                gradients[id(variable)] = tensor_of_array(summed)
