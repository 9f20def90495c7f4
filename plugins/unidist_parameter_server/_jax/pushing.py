"""A worker's parameters between a compiled program and the store: pushed and fetched in one call of the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from typing_extensions import override

from unidist.optim import Update
from unidist_arrays.memory import Array
from unidist_jax.compiled import HostOperation, ShapeDtype
from unidist_jax.optimizer import Cell
from unidist_parameter_server.optimizers import AddDifference
from unidist_parameter_server.workers import PushExchange, Worker, WorkerOptions

_ADD = AddDifference()


class PushedLeaves:
    """The leaves of one tree of parameters, in memory that a worker pushes from and fetches to.

    Args:
        options: of the worker.
        update: the framework-free side of the optimizer.

    Attributes:
        is_filled: the store has the parameters.
        is_settled: since the last step all ranks have taken the parameters of the store.
    """

    def __init__(self, options: WorkerOptions, update: Update) -> None:
        self.is_filled = False
        self.is_settled = False
        self._options = options
        self._update = update
        self._workers: list[Worker] = []
        self._held: list[Array] = []

    def step(self, before: Sequence[Array], after: Sequence[Array], results: Sequence[Array]) -> None:
        """Push what an update has made of the parameters, and fetch. Collective the first time, and with sync.

        Args:
            before: the parameters before the update.
            after: those after it.
            results: get those of the store, or with a later fetch, this worker's own.
        """
        if not self._workers:
            self._make_workers(before)
        if not self.is_filled:
            self._write(before)
            for worker in self._workers:
                count = worker.num_parameters
                worker.fill(lambda parameter, slot: None, [0] * count, [_ADD.first_value] * count)
            self.is_filled = True
            # What was fetched then may have a push of another worker already: the update is added to that.
            for held, old, new in zip(self._held, before, after, strict=True):
                held += (new - old).reshape(-1)
        else:
            self._write(after)
        self.is_settled = False
        for worker in self._workers:
            count = worker.num_parameters
            worker.step([_ADD] * count, [True] * count)
        self.read(results)

    def _make_workers(self, leaves: Sequence[Array]) -> None:
        self._held = [np.empty(leaf.size, leaf.dtype) for leaf in leaves]
        first = 0
        for exchange in self._update.exchanges:
            assert isinstance(exchange, PushExchange)
            worker = Worker(self._options, exchange, self._update.communicator, self._update.context, ())
            worker.set_targets(self._held[first : first + worker.num_parameters])
            first += worker.num_parameters
            self._workers.append(worker)

    def _write(self, leaves: Sequence[Array]) -> None:
        for held, leaf in zip(self._held, leaves, strict=True):
            np.copyto(held.reshape(leaf.shape), leaf)

    def read(self, results: Sequence[Array]) -> None:
        """Copy the present parameters to arrays."""
        for held, result in zip(self._held, results, strict=True):
            np.copyto(result, held.reshape(result.shape))

    def fetch(self) -> None:
        """Fetch the newest parameters. Not collective."""
        for worker in self._workers:
            worker.fetch()

    def settle(self) -> None:
        """Push what was not pushed, and fetch on all ranks. Collective."""
        for worker in self._workers:
            worker.flush()
        self._update.communicator.barrier().wait()
        self.fetch()
        self._update.communicator.barrier().wait()
        self.is_settled = True

    def leave(self) -> None:
        """Leave the stores."""
        for worker in self._workers:
            worker.store.leave()


class PushAndFetch(HostOperation):
    """Pushes an update. Operands: the leaves before it, and those after it. Results: the parameters to go on with."""

    can_be_batched: ClassVar[bool] = False

    def __init__(self, cell: Cell[PushedLeaves]) -> None:
        self._cell = cell

    @property
    @override
    def title(self) -> str:
        return "a step of parameter_server"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return list(operands[: len(operands) // 2])

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        self._cell.value.step(operands[: len(results)], operands[len(results) :], results)
