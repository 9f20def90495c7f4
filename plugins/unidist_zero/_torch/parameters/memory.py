"""Where parameters are whose updates are shared: flat memory of all of them, one for all ranks, or shards (stage 3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from unidist.timeline import Recorder
from unidist_torch.gradients.parameters import shaped, take_back
from unidist_torch.memory import tensor_of
from unidist_zero._torch.parameters.gathered import Presence
from unidist_zero._torch.parameters.shared_pages import move_to_pages
from unidist_zero._torch.parameters.stage3 import SharedModel
from unidist_zero.sharding.all_gather import ShardGather
from unidist_zero.sharding.reduce_scatter import ReduceScatterExchange
from unidist_zero.sharding.shared_pages import SharedShards


class ParameterMemory(ABC):
    """The memory of the parameters of one exchange, as the inner step needs it: `before_step`, `start`, `finish`.

    Attributes:
        is_offloaded: the shards are where the strategy's option `offload` says, and need no copy there.
    """

    is_offloaded: bool = False

    @abstractmethod
    def own(self, number: int) -> torch.Tensor:
        """Return this rank's shard of bucket `number`, flat: to be updated in place."""

    @abstractmethod
    def before_step(self) -> None:
        """Return when the shards hold what the parameters are, and this rank may write to them. Collective."""

    @abstractmethod
    def start(self) -> None:
        """The shards are updated: start to bring them to all ranks. Collective."""

    @abstractmethod
    def finish(self) -> None:
        """Return when all ranks have all parameters, or will get them when they use them. Collective."""


class FlatMemory(ParameterMemory):
    """Stages 1 and 2: every rank has all parameters, in memory of the buckets' layout.

    Args:
        exchange: of the gradients.
        parameters: as numbered by the exchange. They stay the same objects with the same values.
        recorder: takes one event for each bucket that is gathered.
    """

    def __init__(self, exchange: ReduceScatterExchange, parameters: Sequence[torch.Tensor], recorder: Recorder) -> None:
        partition = exchange.partition
        memory = [exchange.allocate(cut.count, cut) for cut in partition.buckets]
        self._places = [
            (parameters[index], _move(parameters[index], tensor_of(memory[number].slice(slot.offset, slot.count))))
            for index, (number, slot) in partition.places().items()
        ]
        self._num_buckets = len(memory)
        self._gather = ShardGather(partition, memory, exchange.lanes, recorder)

    def own(self, number: int) -> torch.Tensor:
        """See `ParameterMemory.own`."""
        return tensor_of(self._gather.own(number))

    def before_step(self) -> None:
        """See `ParameterMemory.before_step`: shards are a part of the parameters."""
        for parameter, place in self._places:
            take_back(parameter, place)

    def start(self) -> None:
        """See `ParameterMemory.start`."""
        for number in range(self._num_buckets):
            self._gather.post(number)

    def finish(self) -> None:
        """See `ParameterMemory.finish`."""
        self._gather.wait()


class SharedPagesMemory(ParameterMemory):
    """Every rank sees all parameters in the same memory, in which each updates its shards.

    Args:
        exchange: of the gradients. All its buckets are in host memory.
        parameters: as numbered by the exchange. They stay the same objects with the same values.
    """

    def __init__(self, exchange: ReduceScatterExchange, parameters: Sequence[torch.Tensor]) -> None:
        self._shards = SharedShards(exchange.partition, next(iter(exchange.lanes.values())))
        self._places = move_to_pages(self._shards, exchange.partition.places(), parameters)

    def own(self, number: int) -> torch.Tensor:
        """See `ParameterMemory.own`."""
        return tensor_of(self._shards.own(number))

    def before_step(self) -> None:
        """See `ParameterMemory.before_step`."""
        for parameter, place in self._places:
            take_back(parameter, place)
        self._shards.begin_update()

    def start(self) -> None:
        """See `ParameterMemory.start`."""
        self._shards.end_update()

    def finish(self) -> None:
        """See `ParameterMemory.finish`."""
        self._shards.finish_update()


class UnitMemory(ParameterMemory):
    """Stage 3: every rank has its shards; units gather the rest when they compute.

    Args:
        exchange: of the gradients; each bucket is of one unit.
        parameters: as numbered by the exchange.
        model: whose units they are of.
    """

    def __init__(self, exchange: ReduceScatterExchange, parameters: Sequence[torch.Tensor], model: SharedModel) -> None:
        made = model.add(exchange.partition, dict(enumerate(parameters)), model.lanes_for(exchange))
        self.is_offloaded = model.offload is not None
        self._buckets = {bucket.number: bucket for bucket in made}

    def own(self, number: int) -> torch.Tensor:
        """See `ParameterMemory.own`."""
        return self._buckets[number].own_tensor()

    def before_step(self) -> None:
        """See `ParameterMemory.before_step`."""
        for bucket in self._buckets.values():
            bucket.settle()

    def start(self) -> None:
        """See `ParameterMemory.start`: what is gathered is out of date."""
        for bucket in self._buckets.values():
            if bucket.presence is Presence.GATHERED:
                bucket.release()

    def finish(self) -> None:
        """See `ParameterMemory.finish`: units gather when they compute."""


def _move(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Let a parameter have its values in other memory; returns its place there."""
    with torch.no_grad():
        place = shaped(flat, parameter)
        place.copy_(parameter)
        parameter.data = place
    return place.detach()
