"""The sampler of a sharded loader: this rank's part of each epoch, from any position of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.data
from typing_extensions import override

from unidist.errors import UsageError
from unidist.mesh import SAMPLE_AXES
from unidist.runtime import context
from unidist.training.division import global_batches, length_of_rank, part_of_rank
from unidist.training.items import Items
from unidist.training.loader_state import LoaderPosition, LoaderState
from unidist.training.sharding import Tail, check_tail
from unidist_torch.loading.shards import Shards


class ShardSampler(torch.utils.data.Sampler[Any], Shards):
    """Divides the items of each epoch over the ranks; every iteration is the next epoch.

    Args:
        items: of each epoch, the same on every rank.
        batch_size: items that each rank processes in a step.
        tail: what happens to items that do not divide, see `shard`.
        cost: of an item, see `shard`.
    """

    def __init__(
        self, items: Items, *, batch_size: int = 1, tail: Tail = "pad", cost: Callable[[Any], float] | None = None
    ) -> None:
        check_tail(tail)
        self.data = items.data
        self.position = LoaderPosition()
        self._items = items
        self._expected: int | None = None
        self._batch_size, self._tail, self._cost = batch_size, tail, cost

    @override
    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:  # else it continues in the middle, if a state says so
            self.position, self._expected = LoaderPosition(epoch), None

    @override
    def begin(self) -> LoaderPosition:
        return self.position

    @override
    def reached(self, position: LoaderPosition, batch: Any) -> tuple[LoaderPosition, Any]:
        return LoaderPosition(position.epoch, (position.start + self._step(),)), batch

    @override
    def num_before(self, begun: LoaderPosition) -> int:
        return begun.start // self._step()

    def _step(self) -> int:
        """Return the number of items of all ranks in a step."""
        return self._batch_size * context.current().axis_size(SAMPLE_AXES)

    @override
    def state(self, position: LoaderPosition | None) -> LoaderState:
        if position is None:
            return LoaderState(self.position, self.data, self._expected)
        return LoaderState(position, self.data, self._items.fingerprint)

    @override
    def load(self, state: LoaderState) -> None:
        self.position, self._expected = state.position, state.fingerprint

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch with the first item: a DataLoader with workers makes a second iterator, unused."""
        runtime = context.current()
        rank, size = runtime.axis_rank(SAMPLE_AXES), runtime.axis_size(SAMPLE_AXES)
        position, expected = self.position, self._expected
        self.position, self._expected = LoaderPosition(position.epoch + 1), None
        items = self._items.draw(position.epoch)
        if expected not in (None, self._items.fingerprint):
            raise UsageError(
                f"the state of load_state_dict() is in the middle of epoch {position.epoch}, and now {self.data} draws "
                f"other items in that epoch (seen on rank {runtime.topology.rank}). Make the sampler as it was, "
                "with the same data, batch size and seeds; its order may depend on set_epoch(), but not on earlier "
                "epochs"
            )
        batches = global_batches(items, batch_size=self._batch_size, size=size, tail=self._tail, start=position.start)
        for batch in batches:
            yield from part_of_rank(batch, rank, size, self._cost)

    def __len__(self) -> int:
        """Return the number of this rank's items of a whole epoch.

        Raises:
            TypeError: it is not known.
        """
        runtime = context.current()
        rank, size = runtime.axis_rank(SAMPLE_AXES), runtime.axis_size(SAMPLE_AXES)
        return length_of_rank(len(self._items), rank, size, self._tail)
