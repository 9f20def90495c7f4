"""The gradients of a worker on their way to the store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from unidist.buffer import HOST, DType
from unidist.communicator import Communicator
from unidist.communicator_capabilities import SharesMemory
from unidist.errors import ConfigurationError, UsageError
from unidist.framework import Framework
from unidist.gradients import LocalExchange, ParameterInfo, ReducedGradients
from unidist_parameter_server.optimizers.interface import Array
from unidist_parameter_server.store.inboxes import Inboxes
from unidist_parameter_server.store.shards import FlatMemory, ParameterSlot

_TYPES = (DType.FLOAT32, DType.FLOAT64)


class PushExchange(LocalExchange):
    """Gives each worker its own gradients; the inner step pushes them.

    Args:
        parameters: of the gradients, in host memory.
        framework: allocates the memory, and multiplies.
        num_ranks: see `LocalExchange`.
        is_mean: updates are made of the mean over workers, so that a norm of one worker's gradients means nothing.
        is_local: see `GradientExchange.is_local`.
        communicator: over the workers, if they leave their gradients alone until these are applied: then they are in
            memory that all workers map, and are not copied. The creation is collective then. The exchange closes it.

    Raises:
        ConfigurationError: a parameter is of another type than float32 and float64, or on a device.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        framework: Framework,
        num_ranks: int,
        *,
        is_mean: bool,
        is_local: bool,
        communicator: Communicator | None = None,
    ) -> None:
        for parameter in parameters:
            if parameter.memory != HOST or parameter.dtype not in _TYPES:
                raise ConfigurationError(
                    f"parameter_server updates float32 and float64 parameters in host memory, and {parameter.name!r} "
                    f"is {parameter.dtype} in {parameter.memory} memory; use --strategy data"
                )
        self.inboxes: Inboxes | None = None
        allocate = None
        if communicator is not None and isinstance(communicator, SharesMemory) and not communicator.sharing_obstacle():
            self.inboxes = Inboxes(communicator, communicator.rank, communicator.size)
            allocate = self.inboxes.allocate
        super().__init__(parameters, framework, num_ranks, allocate=allocate)
        if communicator is not None:
            communicator.close()
        self._is_mean = is_mean
        self._is_local = is_local

    @property
    @override
    def is_local(self) -> bool:
        return self._is_local

    @override
    def reduced(self) -> ReducedGradients:
        if self._is_mean:
            raise UsageError(
                "the gradients were to be clipped, but in a synchronous step of parameter_server their mean is in the "
                "store alone. Use --strategy data with clip_norm or clip_value"
            )
        return super().reduced()

    def memories(self) -> list[tuple[FlatMemory, Array]]:
        """Return the flat memory of all gradients, with the places of the parameters."""
        found = []
        for buffer in super().reduced().memory:
            end = buffer.address + buffer.nbytes
            slots = tuple(
                ParameterSlot(index, (own.address - buffer.address) // buffer.dtype.itemsize, own.count)
                for index, own in enumerate(map(self.buffer, range(len(self.parameters))))
                if own.count and buffer.address <= own.address < end
            )
            array = np.frombuffer(buffer.bytes(), buffer.dtype.value)
            found.append((FlatMemory(buffer.dtype, buffer.count, slots), array))
        return found
