"""Parameters of torch in memory that the ranks of a host share."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from unidist.gradients.buckets import ParameterInfo, Slot, plan_buckets
from unidist_torch.gradients.parameters import shaped
from unidist_torch.memory import dtype_of, memory_kind, tensor_of
from unidist_zero.sharding.partition import partition
from unidist_zero.sharding.shard_groups import ShardGroup
from unidist_zero.sharding.shared_pages import SharedBuckets

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI


class PagedModel:
    """A model at stage 3 without FSDP units: its host holds one copy of every parameter for all ranks.

    Parameters that an optimizer trains are in its `SharedPagesMemory`; the others are here. Every rank makes the same
    calls.

    Args:
        context: that it was made in.
    """

    def __init__(self, context: RuntimeAPI) -> None:
        self._context = weakref.ref(context)
        self._trained: set[int] = set()
        self._frozen: list[tuple[frozenset[int], SharedBuckets]] = []  # with the identities of the parameters

    def is_of(self, context: RuntimeAPI | None) -> bool:
        """Return whether it was made in this context."""
        return context is not None and self._context() is context

    def note_trained(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note parameters that an optimizer trains: their memory is elsewhere."""
        self._trained.update(map(id, parameters))
        self._frozen = [(held, shards) for held, shards in self._frozen if not held <= self._trained]

    def add_frozen(self, parameters: Iterable[torch.Tensor], shard_group: ShardGroup) -> None:
        """Move parameters that no optimizer trains to memory that the ranks of a shard group share. Collective."""
        frozen = [parameter for parameter in parameters if id(parameter) not in self._trained]
        if not frozen:
            return
        infos = [
            ParameterInfo(str(number), tuple(parameter.shape), dtype_of(parameter), memory_kind(parameter))
            for number, parameter in enumerate(frozen)
        ]
        divided = partition(plan_buckets(infos, bucket_bytes=1 << 25), shard_group.communicator.size)
        buckets = SharedBuckets(divided, shard_group)
        move_to_pages(buckets, divided.places(), frozen)
        self._frozen.append((frozenset(map(id, frozen)), buckets))

    def publish_writes(self) -> None:
        """Copy the script's writes to frozen parameters to shared memory, and drop private copies. Collective."""
        for _, shards in self._frozen:
            shards.begin_update()
            shards.wait()


@torch.no_grad()
def move_to_pages(
    shards: SharedBuckets, places: Mapping[int, tuple[int, Slot]], parameters: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Move parameters to shared memory. If their values differ between ranks, each keeps its own. Collective.

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
