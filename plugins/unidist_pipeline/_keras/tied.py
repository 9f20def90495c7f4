"""Variables that several stages use: their gradients are added up over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from unidist.communicator import Communicator
from unidist.runtime_api import RuntimeAPI
from unidist_tensorflow.memory import NUMPY_DTYPES, array_of, buffer_of_array, dtype_of, empty_array, tensor_of_array


class _Groups:
    """Communicators made by `TiedVariables`, to be closed with the runtime."""

    def __init__(self, context: RuntimeAPI) -> None:
        self.made: list[Communicator] = []

    def close(self) -> None:
        for group in self.made:
            group.close()


class TiedVariables:
    """The tied variables of this rank. Creation is collective over the pipeline.

    Args:
        context: the runtime, which closes the communicators made here.
        communicator: along the pipeline.
        tied: for each tied variable of the model, in the same order on all ranks: the ranks that hold it, and the
            variable, of which only these ranks have the value.
    """

    def __init__(
        self, context: RuntimeAPI, communicator: Communicator, tied: Sequence[tuple[Sequence[int], Any]]
    ) -> None:
        self._groups: list[tuple[Communicator, list[Any]]] = []
        owned = context.owned(_Groups)
        holders: dict[tuple[int, ...], list[Any]] = {}
        for ranks, variable in tied:
            holders.setdefault(tuple(ranks), []).append(variable)
        for ranks, variables in holders.items():
            is_member = communicator.rank in ranks
            group = communicator.split(ranks if is_member else ())
            if group is not None:
                owned.made.append(group)
                self._groups.append((group, variables))

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
