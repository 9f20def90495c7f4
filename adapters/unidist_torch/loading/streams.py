"""Batches of an IterableDataset: each element on one rank and one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch.utils.data
from typing_extensions import override

from unidist.errors import UsageError
from unidist.mesh import SAMPLE_AXES
from unidist.runtime import context
from unidist.training.division import global_batches, length_of_rank, part_of_rank
from unidist.training.loader_state import LoaderPosition, LoaderState
from unidist.training.sharding import Tail
from unidist_torch.loading.random_states import RandomStates
from unidist_torch.loading.shards import Shards
from unidist_torch.loading.worker_info import WatchedInfo

PartProgress = tuple[int, int, int]
"""Part of the stream, number of parts, and elements of that part that all ranks together have processed."""


class StreamBatches(torch.utils.data.IterableDataset[tuple[PartProgress, Any]]):
    """This rank's batches of a stream, each with the progress after it; a loader has it as its dataset.

    A dataset that asks `get_worker_info()` gives each worker its own part: of each part this rank gets every `size`-th
    element. All workers of another dataset read the same elements: they take turns at making this rank's batches, which
    are those that one worker would make. The attributes say which iteration comes next.

    Args:
        dataset: the user's.
        batch_size: of this rank; None: elements are batches.
        collate: makes a batch of a list of elements; of an element if these are batches.
        drop_last: leave out an incomplete batch.
        seed: of the global generators while elements are drawn.
        tail: what happens to elements that do not divide, see `shard`.
        cost: of an element, see `shard`.
    """

    def __init__(
        self,
        dataset: torch.utils.data.IterableDataset[Any],
        *,
        batch_size: int | None,
        collate: Callable[[Any], Any],
        drop_last: bool,
        seed: int,
        tail: Tail,
        cost: Callable[[Any], float] | None,
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.position = LoaderPosition()
        self.place = (0, 1)
        self._collate, self._drop_last, self._tail, self._cost = collate, drop_last, tail, cost
        self._seed = seed

    def __iter__(self) -> Iterator[tuple[PartProgress, Any]]:
        position = self.position
        self.position = LoaderPosition(position.epoch + 1)  # of the next iteration in workers that persist
        return self._iterate(position)

    def _iterate(self, position: LoaderPosition) -> Iterator[tuple[PartProgress, Any]]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(position.epoch)
        watched = WatchedInfo.of_worker(self.dataset)
        states = RandomStates(self._seed + position.epoch)
        with states:
            elements = iter(self.dataset)
            first = list(islice(elements, 1))
        elements = chain(first, elements)
        if watched is None or not watched.was_asked:
            self._check_parts(position, 1)
            yield from self._turns(self._batches(elements, states, position.start), watched)
            return
        worker, num_parts = watched.place
        self._check_parts(position, num_parts)
        states.seed_part(worker)  # until here all workers have to draw the same: they may shuffle before they divide
        start = position.processed[worker] if position.processed else 0
        for reached, batch in self._batches(elements, states, start):
            yield (worker, num_parts, reached), self._collate(batch)

    def _turns(
        self, batches: Iterator[tuple[int, Any]], watched: WatchedInfo | None
    ) -> Iterator[tuple[PartProgress, Any]]:
        """Yield those batches of the whole stream that it is this worker's turn to make."""
        worker, num_workers = (0, 1) if watched is None else watched.place
        for number, (reached, batch) in enumerate(batches):
            if watched is not None and watched.was_asked:
                raise UsageError(
                    f"{type(self.dataset).__name__} asked get_worker_info() after its first element (rank "
                    f"{self.place[0]} of {self.place[1]}, worker {worker}), and until then it was read as one that "
                    "gives all workers the same elements. Let __iter__ ask before its first element"
                )
            if number % num_workers == worker:
                yield (0, 1, reached), self._collate(batch)

    def _batches(self, elements: Iterator[Any], states: RandomStates, start: int) -> Iterator[tuple[int, Any]]:
        """Yield this rank's batches of a part, and the number of its elements that are processed after each."""
        rank, size = self.place
        batch_size = 1 if self.batch_size is None else self.batch_size
        whole = global_batches(elements, batch_size=batch_size, size=size, tail=self._tail, start=start)
        reached = start
        while True:
            with states:
                batch = next(whole, None)
            if batch is None:
                return
            reached += batch_size * size
            own = part_of_rank(batch, rank, size, self._cost)
            if own and not (self._drop_last and len(own) < batch_size):
                yield reached, own[0] if self.batch_size is None else own

    def num_batches(self, rank: int, size: int) -> int:
        """Return the number of a rank's batches of an epoch, if one worker reads it.

        Raises:
            TypeError: the dataset has no length.
        """
        count = length_of_rank(len(self.dataset), rank, size, self._tail)  # type: ignore[arg-type]  # see Raises
        batch_size = 1 if self.batch_size is None else self.batch_size
        return count // batch_size if self._drop_last else -(-count // batch_size)

    def _check_parts(self, position: LoaderPosition, num_parts: int) -> None:
        if position.processed and len(position.processed) != num_parts:
            found = f"the dataset is now read in {num_parts} parts (rank {self.place[0]} of {self.place[1]})"
            raise UsageError(
                f"the state of load_state_dict() is of a stream that was read in {len(position.processed)} parts, and "
                f"{found}. Make the loader with as many workers as it had when the state was saved"
            )


class StreamShards(Shards):
    """The part of a stream that is this rank's, as its loader sees it; the batches are made in workers.

    Args:
        batches: the dataset of the loader.
        seed: of the batches.
    """

    def __init__(self, batches: StreamBatches, *, seed: int) -> None:
        self.data = f"the elements of a {type(batches.dataset).__name__}, seed={seed}"
        self.position = LoaderPosition()
        self._batches = batches

    @override
    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.position = LoaderPosition(epoch)

    @override
    def begin(self) -> LoaderPosition:
        runtime, begun = context.current(), self.position
        self._batches.place = runtime.axis_rank(SAMPLE_AXES), runtime.axis_size(SAMPLE_AXES)
        self._batches.position, self.position = begun, LoaderPosition(begun.epoch + 1)
        return begun

    @override
    def reached(self, position: LoaderPosition, batch: Any) -> tuple[LoaderPosition, Any]:
        (part, num_parts, reached), batch = batch
        processed = position.processed or (0,) * num_parts
        return LoaderPosition(position.epoch, (*processed[:part], reached, *processed[part + 1 :])), batch

    @override
    def state(self, position: LoaderPosition | None) -> LoaderState:
        return LoaderState(self.position if position is None else position, self.data)

    @override
    def load(self, state: LoaderState) -> None:
        self.position = state.position

    @override
    def num_batches(self) -> int:
        runtime = context.current()
        return self._batches.num_batches(runtime.axis_rank(SAMPLE_AXES), runtime.axis_size(SAMPLE_AXES))
