"""The interface of a store for workers, independent of where the store is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unidist_parameter_server.optimizers import Rule
from unidist_parameter_server.store.shards import StoreShard

Array = np.ndarray[Any, np.dtype[Any]]

Receive = Callable[[Array], None]
"""Takes the values of a shard, `(count,)`, which are valid during the call alone."""


@dataclass(frozen=True)
class Push:
    """A worker's push to all shards.

    Args:
        number: of this push among those of its worker, from 1. A shard applies each number at most once.
        change: returns this worker's gradient or difference for a shard, `(count,)` of its type.
        rules: for each parameter, how it is changed. In a synchronous step equal on all workers.
        present: for each parameter, whether this worker has a gradient for it.
        factor: of the learning rate, or of the difference.
        read_versions: for each shard, its version when this worker read it, where the rate is divided by the number of
            updates since then (its staleness); None: it is not.
        is_kept: what `change` returns stays as it is until the push is complete; else until `change` is called again.
    """

    number: int
    change: Callable[[StoreShard], Array]
    rules: Sequence[Rule]
    present: Sequence[bool]
    factor: float = 1.0
    read_versions: Sequence[int] | None = None
    is_kept: bool = False


@dataclass(frozen=True)
class Contents:
    """Everything that a store keeps of one shard.

    Args:
        values: of the parameters, `(count,)`.
        slots: of the optimizer, by their order in `Rule.slots`.
        counts: number of updates of each of the shard's pieces.
    """

    values: Array
    slots: Sequence[Array]
    counts: Array


class Store(ABC):
    """Parameters in shards, with the state of their optimizer, and the clocks of the workers.

    Each worker has its own object. Call its methods from one thread at a time.

    Attributes:
        shards: equal on every worker.
        slots: names of the optimizer's arrays.
        worker: number of this worker.
        num_workers: of all that there were at the start.
    """

    shards: Sequence[StoreShard]
    slots: Sequence[str]
    worker: int
    num_workers: int

    @abstractmethod
    def fill(self, write: Callable[[StoreShard, Contents], None]) -> None:
        """Let workers write the contents of all shards, each those of some. Collective.

        Args:
            write: changes the contents of one shard in place; the same on every worker.
        """

    @abstractmethod
    def read(self, index: int, receive: Receive) -> int:
        """Give the values of a shard to `receive`, all of one version; return that."""

    @abstractmethod
    def contents(self, index: int, receive: Callable[[Contents], None]) -> None:
        """Give all contents of a shard to `receive`, all of one version; not to be changed."""

    @abstractmethod
    def push(self, index: int, push: Push, receive: Receive | None = None, *, waits: bool = True) -> int | None:
        """Apply a push to a shard at once, and return the shard's version after it.

        A push that was applied to this shard before is not applied again.

        Args:
            index: of the shard.
            push: of this worker.
            receive: is given the new values.
            waits: while another worker uses the shard; False: then None is returned, and nothing is done.
        """

    def read_all(self, order: Sequence[int], receiver: Callable[[int], Receive]) -> dict[int, int]:
        """Read several shards, each as `read` does, and return their versions.

        Args:
            order: numbers of the shards. They may come in another order, and at the same time.
            receiver: returns what takes the values of a shard.
        """
        return {index: self.read(index, receiver(index)) for index in order}

    def push_all(
        self, order: Sequence[int], push: Push, receiver: Callable[[int], Receive] | None = None
    ) -> dict[int, int]:
        """Apply a push to several shards, each as `push` does, and return their versions.

        The default passes over shards that other workers use, and comes back to them later.

        Args:
            order: numbers of the shards. They may come in another order, and at the same time.
            push: of this worker.
            receiver: returns what takes the new values of a shard.
        """
        versions: dict[int, int] = {}
        pending, waits = list(order), False
        while pending:
            busy = []
            for index in pending:
                version = self.push(index, push, None if receiver is None else receiver(index), waits=waits)
                if version is None:
                    busy.append(index)
                else:
                    versions[index] = version
            waits = len(busy) == len(pending)
            pending = busy
        return versions

    def saved(self) -> None:  # noqa: B027 - stores that cannot be lost need not know
        """What was pushed until now is saved elsewhere, as far as this worker knows."""

    @abstractmethod
    def finish_step(self, bound: int | None) -> None:
        """Advance this worker's clock, and wait until it is at most `bound` above that of the slowest worker.

        Args:
            bound: None: it does not wait.

        Raises:
            StalledError: a worker that is waited for is alive but makes no step; names it.
        """

    @property
    @abstractmethod
    def version(self) -> int:
        """The number of synchronous steps that were applied."""

    @abstractmethod
    def push_together(self, push: Push, label: int, *, waits: bool) -> bool:
        """Push for a synchronous step, which is applied when enough workers have pushed for it.

        Args:
            push: of this worker.
            label: `version` when the worker read the parameters.
            waits: return when the step has been applied.

        Returns:
            Whether the push counts, or may still count; a late one is dropped.

        Raises:
            PeerLostError: too few workers are left for a step.
            StalledError: a worker that is waited for is alive but does not push; names it.
        """

    @abstractmethod
    def retire(self) -> None:
        """Let this worker not be waited for any more, though it may still read. For a runtime that another follows."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether this worker has not left."""

    @abstractmethod
    def leave(self) -> None:
        """Let this worker not be waited for any more, and give back what it has opened. Idempotent."""
