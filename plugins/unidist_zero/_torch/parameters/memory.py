"""Memory of parameters whose updates are sharded: flat on each rank, one copy for all ranks, or shards (stage 3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from typing_extensions import override

from unidist.timeline import Recorder
from unidist_torch.gradients.parameters import reattach, shaped
from unidist_torch.memory import tensor_of
from unidist_zero._torch.parameters.gathered_bucket import BucketState
from unidist_zero._torch.parameters.shared_pages import move_to_pages
from unidist_zero._torch.parameters.stage3 import ShardedModel
from unidist_zero.sharding.all_gather import ShardGather
from unidist_zero.sharding.reduce_scatter import ReduceScatterExchange
from unidist_zero.sharding.shared_pages import SharedBuckets


class ParameterMemory(ABC):
    """The memory of the parameters of one exchange, as the inner step uses it.

    The step calls `before_step`, `start_gather` and `finish_gather`, in this order.

    Attributes:
        is_offloaded: the shards are where the option `offload` says, and need no copy there.
    """

    is_offloaded: bool = False

    @abstractmethod
    def own(self, number: int) -> torch.Tensor:
        """Return this rank's shard of bucket `number`, flat, to be updated in place."""

    @abstractmethod
    def before_step(self) -> None:
        """Return when the shards hold the parameters' values and this rank may write to them. Collective."""

    @abstractmethod
    def start_gather(self) -> None:
        """Start to send the updated shards to all ranks. Collective."""

    @abstractmethod
    def finish_gather(self) -> None:
        """Return when all ranks have all parameters, or will get them on first use. Collective."""


class FlatParameterMemory(ParameterMemory):
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
        self._gather = ShardGather(partition, memory, exchange.shard_groups, recorder)

    @override
    def own(self, number: int) -> torch.Tensor:
        return tensor_of(self._gather.own(number))

    @override
    def before_step(self) -> None:
        """See `ParameterMemory.before_step`: shards are a part of the parameters."""
        for parameter, place in self._places:
            reattach(parameter, place)

    @override
    def start_gather(self) -> None:
        for number in range(self._num_buckets):
            self._gather.post(number)

    @override
    def finish_gather(self) -> None:
        self._gather.wait()


class SharedPagesMemory(ParameterMemory):
    """Every rank sees all parameters in the same memory, in which each updates its shards.

    Args:
        exchange: of the gradients. All its buckets are in host memory.
        parameters: as numbered by the exchange. They stay the same objects with the same values.
    """

    def __init__(self, exchange: ReduceScatterExchange, parameters: Sequence[torch.Tensor]) -> None:
        self._shards = SharedBuckets(exchange.partition, next(iter(exchange.shard_groups.values())))
        self._places = move_to_pages(self._shards, exchange.partition.places(), parameters)

    @override
    def own(self, number: int) -> torch.Tensor:
        return tensor_of(self._shards.own(number))

    @override
    def before_step(self) -> None:
        for parameter, place in self._places:
            reattach(parameter, place)
        self._shards.begin_update()

    @override
    def start_gather(self) -> None:
        self._shards.end_update()

    @override
    def finish_gather(self) -> None:
        self._shards.finish_update()


class UnitMemory(ParameterMemory):
    """Stage 3: every rank has its shards; FSDP units gather the rest when they compute.

    Args:
        exchange: of the gradients; each bucket belongs to one unit.
        parameters: as numbered by the exchange.
        model: has the units.
    """

    def __init__(
        self, exchange: ReduceScatterExchange, parameters: Sequence[torch.Tensor], model: ShardedModel
    ) -> None:
        made = model.add(exchange.partition, dict(enumerate(parameters)), model.shard_groups_for(exchange))
        self.is_offloaded = model.offload is not None
        self._buckets = {bucket.number: bucket for bucket in made}

    @override
    def own(self, number: int) -> torch.Tensor:
        return self._buckets[number].own_tensor()

    @override
    def before_step(self) -> None:
        for bucket in self._buckets.values():
            bucket.update_shard()

    @override
    def start_gather(self) -> None:
        """See `ParameterMemory.start_gather`: what is gathered is out of date."""
        for bucket in self._buckets.values():
            if bucket.state is BucketState.GATHERED:
                bucket.release()

    @override
    def finish_gather(self) -> None:
        """See `ParameterMemory.finish_gather`: units gather when they compute."""


def _move(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Move a parameter's values to other memory; returns the parameter's view of it."""
    with torch.no_grad():
        place = shaped(flat, parameter)
        place.copy_(parameter)
        parameter.data = place
    return place.detach()
