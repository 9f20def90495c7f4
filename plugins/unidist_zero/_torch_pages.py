"""Parameters of torch in memory that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unidist_torch.memory import tensor_of
from unidist_torch.parameters import shaped
from unidist_zero._torch_memory import ParameterMemory
from unidist_zero.exchange import ReduceScatterExchange
from unidist_zero.shared import SharedShards


class SharedPagesMemory(ParameterMemory):
    """Every rank sees all parameters in the same memory, in which each updates its shards.

    Args:
        exchange: of the gradients. All its buckets are in host memory.
        parameters: as numbered by the exchange. They stay the same objects with the same values.
    """

    def __init__(self, exchange: ReduceScatterExchange, parameters: Sequence[torch.Tensor]) -> None:
        self._shards = SharedShards(exchange.partition, next(iter(exchange.lanes.values())))
        self._move(exchange, parameters)

    def own(self, number: int) -> torch.Tensor:
        """See `ParameterMemory.own`."""
        return tensor_of(self._shards.own(number))

    def before_step(self) -> None:
        """See `ParameterMemory.before_step`."""
        self._shards.begin_update()

    def start(self) -> None:
        """See `ParameterMemory.start`."""
        self._shards.end_update()

    def finish(self) -> None:
        """See `ParameterMemory.finish`."""
        self._shards.finish_update()

    @torch.no_grad()
    def _move(self, exchange: ReduceScatterExchange, parameters: Sequence[torch.Tensor]) -> None:
        """Let the parameters have their values in shared memory. Where ranks differ, each keeps its own."""
        shards, places = self._shards, exchange.partition.places()
        if shards.is_first:
            for index, (number, slot) in places.items():
                flat = tensor_of(shards.shared(number).slice(slot.offset, slot.count))
                shaped(flat, parameters[index]).copy_(parameters[index])
        shards.wait()
        for index, (number, slot) in places.items():
            parameter = parameters[index]
            place = shaped(tensor_of(shards.view(number).slice(slot.offset, slot.count)), parameter)
            if not torch.equal(place, parameter):
                place.copy_(parameter)
            parameter.data = place
