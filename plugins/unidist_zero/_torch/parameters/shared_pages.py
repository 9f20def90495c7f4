"""Parameters of torch in memory that the ranks of a host share."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from unidist.gradients.buckets import ParameterInfo, Slot, plan_buckets
from unidist_torch.gradients.parameters import shaped
from unidist_torch.memory import dtype_of, memory_kind, tensor_of
from unidist_zero.sharding.lanes import Lane
from unidist_zero.sharding.partition import partition
from unidist_zero.sharding.shared_pages import SharedShards

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI


class PagedModel:
    """A model at stage 3 that needs no units, because its host holds every parameter once for all ranks.

    What an optimizer trains is in its `SharedPagesMemory`; the rest is here. Every rank calls the methods alike.

    Args:
        context: that it was made in.
    """

    def __init__(self, context: RuntimeAPI) -> None:
        self._context = weakref.ref(context)
        self._trained: set[int] = set()
        self._frozen: list[tuple[frozenset[int], SharedShards]] = []  # with the identities of the parameters

    def is_of(self, context: RuntimeAPI | None) -> bool:
        """Say whether it was made in this context."""
        return context is not None and self._context() is context

    def leave(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take note of parameters that an optimizer trains: they have their place elsewhere."""
        self._trained.update(map(id, parameters))
        self._frozen = [(held, shards) for held, shards in self._frozen if not held <= self._trained]

    def add_frozen(self, parameters: Iterable[torch.Tensor], lane: Lane) -> None:
        """Move what no optimizer trains to memory that the ranks of a lane share. Collective."""
        frozen = [parameter for parameter in parameters if id(parameter) not in self._trained]
        if not frozen:
            return
        infos = [
            ParameterInfo(str(number), tuple(parameter.shape), dtype_of(parameter), memory_kind(parameter))
            for number, parameter in enumerate(frozen)
        ]
        divided = partition(plan_buckets(infos, bucket_bytes=1 << 25), lane.shard.size)
        shards = SharedShards(divided, lane)
        move_to_pages(shards, divided.places(), frozen)
        self._frozen.append((frozenset(map(id, frozen)), shards))

    def settle(self) -> None:
        """Bring what the script has written to frozen parameters to shared memory; copies of it go. Collective."""
        for _, shards in self._frozen:
            shards.begin_update()
            shards.wait()


@torch.no_grad()
def move_to_pages(
    shards: SharedShards, places: Mapping[int, tuple[int, Slot]], parameters: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Let parameters have their values in shared memory. Where ranks differ, each keeps its own. Collective.

    Returns:
        The parameters with their places.
    """
    moved = []
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
        moved.append((parameter, place))
    return moved
