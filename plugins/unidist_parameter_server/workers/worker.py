"""One worker's part: when it pushes, when it fetches, and what. Free of any framework."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from unidist.communicator import Communicator
from unidist.errors import NotInitializedError
from unidist_parameter_server.client import Servers, make_remote_store
from unidist_parameter_server.optimizers import Rule
from unidist_parameter_server.store import Contents, Push, Store, make_shared_store
from unidist_parameter_server.store.clocks import waits_for_step
from unidist_parameter_server.store.flat import FlatChange, FlatTargets
from unidist_parameter_server.store.interface import Receive
from unidist_parameter_server.store.memory import StoreShape
from unidist_parameter_server.store.shards import StoreShard, cut

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI
    from unidist_parameter_server.workers.exchange import PushExchange

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class WorkerOptions:
    """The options of the strategy, as a worker uses them.

    Args:
        together: steps are synchronous, else pushes are applied at once.
        bound: of the clocks where they are not; None: there is none.
        backup: so many gradients of a synchronous step are not needed.
        difference: differences are pushed instead of gradients.
        push_every: steps between two pushes.
        fetch_every: steps between two fetches.
        scales: the rate, or the difference, is divided by the number of workers.
        modulates: it is divided by the staleness of a push.
        partition_bytes: size of a shard.
        servers: where the store is; of none, in memory that the workers share.
    """

    together: bool
    bound: int | None
    backup: int
    difference: bool
    push_every: int
    fetch_every: int
    scales: bool
    modulates: bool
    partition_bytes: int
    servers: Servers = field(default_factory=lambda: Servers(0, 0))


class OpenStores:
    """The stores of a runtime, which a worker leaves when the runtime ends.

    In an elastic job another runtime may follow, which reads them: then they are left by whoever has them.

    Args:
        runtime: that owns it.
    """

    def __init__(self, runtime: RuntimeAPI) -> None:
        self._is_elastic = runtime.is_elastic
        self._stores: weakref.WeakSet[Store] = weakref.WeakSet()

    def add(self, store: Store) -> None:
        """Leave this store at the end."""
        self._stores.add(store)

    def close(self) -> None:
        """Leave all stores."""
        for store in list(self._stores):
            if self._is_elastic:
                store.retire()
            else:
                store.leave()


class Worker:
    """Pushes the gradients of one exchange, and brings the parameters back. Its creation is collective.

    Args:
        options: of the strategy.
        exchange: has the gradients.
        communicator: over the workers.
        context: the runtime, at whose end the store is left.
        slots: names of the optimizer's arrays.
        log_length: number of pushes that are remembered for each shard.

    Attributes:
        store: where the parameters are.
    """

    def __init__(
        self,
        options: WorkerOptions,
        exchange: PushExchange,
        communicator: Communicator,
        context: RuntimeAPI,
        slots: Sequence[str],
        log_length: int = 0,
    ) -> None:
        memories = exchange.memories()
        self.num_parameters = len(exchange.parameters)
        shards = cut([memory for memory, _ in memories], options.partition_bytes)
        collects = options.together and exchange.inboxes is None
        shape = StoreShape(shards, len(slots), communicator.size, self.num_parameters, collects, log_length)
        needed = communicator.size - options.backup
        self.store: Store = (
            make_remote_store(communicator, shape, slots, options.servers, needed=needed)
            if options.servers.number
            else make_shared_store(communicator, shape, slots, needed=needed, inboxes=exchange.inboxes)
        )
        context.owned(OpenStores).add(self.store)
        self._options = options
        self._factor = 1.0 / communicator.size if options.scales and not options.together else 1.0
        self._gradients = [array for _, array in memories]
        accrues = options.push_every > 1 and not options.difference
        self._accrued = [np.zeros_like(array) for array in self._gradients] if accrues else self._gradients
        self._fetched = [np.zeros_like(array) for array in self._gradients] if options.difference else []
        self._difference = {array.dtype.name: np.zeros(_largest(shards), array.dtype) for array in self._fetched}
        self._flat_change = FlatChange(self._accrued)
        self._targets: Sequence[Array] = ()
        self._flat_targets = FlatTargets((), ())
        self._present = [False] * self.num_parameters
        self._rules: Sequence[Rule] = ()
        self._calls = 0
        self._pending = 0  # steps since the last push
        self._number = 0
        self._label = 0
        self._versions = [0] * len(shards)
        number = len(shards)
        begin = communicator.rank * number // communicator.size
        self._order = [(begin + k) % number for k in range(number)]  # workers begin at different shards

    def set_targets(self, targets: Sequence[Array]) -> None:
        """Fetch to these arrays from now on.

        Args:
            targets: the memory of each parameter, flat and writable.
        """
        self._targets = targets
        self._flat_targets = FlatTargets(self.store.shards, targets)

    def fill(
        self, slot: Callable[[int, int], Array | None], counts: Sequence[int], first_values: Sequence[float]
    ) -> None:
        """Give the store the present parameters and the optimizer's state, equal on all workers. Collective.

        Args:
            slot: returns the array of a parameter's slot (parameter, slot), flat; None: it has none yet.
            counts: number of updates of each parameter.
            first_values: of the slots that a parameter does not have.
        """

        def write(shard: StoreShard, contents: Contents) -> None:
            for place, piece in enumerate(shard.pieces):
                span, own = slice(piece.start, piece.stop), slice(piece.first, piece.first + piece.stop - piece.start)
                contents.values[span] = self._targets[piece.parameter][own]
                contents.counts[place] = counts[piece.parameter]
                for number, kept in enumerate(contents.slots):
                    array = slot(piece.parameter, number)
                    kept[span] = first_values[piece.parameter] if array is None else array[own]

        self.store.fill(write)
        self.fetch()

    def state(self, slots: Sequence[Sequence[Array]]) -> list[int]:
        """Write the optimizer's state to arrays, and return the number of updates of each parameter.

        Args:
            slots: for each parameter its slots, flat.
        """
        counts = [0] * self.num_parameters

        def take(shard: StoreShard, contents: Contents) -> None:
            for place, piece in enumerate(shard.pieces):
                counts[piece.parameter] = max(counts[piece.parameter], int(contents.counts[place]))
                for number, kept in enumerate(contents.slots):
                    own = slice(piece.first, piece.first + piece.stop - piece.start)
                    slots[piece.parameter][number][own] = kept[piece.start : piece.stop]

        for index, shard in enumerate(self.store.shards):
            self.store.contents(index, functools.partial(take, shard))
        return counts

    def step(self, rules: Sequence[Rule], present: Sequence[bool]) -> None:
        """Make a step: push if it is time to, wait as the clocks demand, and fetch if it is time to.

        The gradients are in the memory of the exchange. If differences are pushed, the targets hold what the worker's
        own optimizer has made of the parameters.

        Args:
            rules: for each parameter.
            present: for each parameter, whether it has a gradient.

        Raises:
            PeerLostError: a worker without which no step is possible was lost. StalledError: it makes no step.
        """
        self.check_open()
        self._calls += 1
        self._pending += 1
        self._rules = rules
        if self._pending == 1:
            self._present = list(present)
        else:
            self._present = [either or other for either, other in zip(self._present, present, strict=True)]
        if self._options.together:
            self._step_together()
        else:
            self._step_alone()

    def check_open(self) -> None:
        """Raise NotInitializedError if the runtime of the store has ended."""
        if not self.store.is_open:
            raise NotInitializedError(
                "shutdown() has closed the store of this optimizer's parameters; make another optimizer after init()"
            )

    def flush(self) -> None:
        """Push what was not pushed yet, for a checkpoint that is made next."""
        if self._pending and not self._options.together:
            self._push(None)
        self.store.saved()

    def fetch(self) -> None:
        """Bring the parameters of the store to the targets, with the differences that were not pushed yet."""
        self._label = self.store.version
        self._note(self.store.read_all(self._order, self._receiver()))

    def _step_together(self) -> None:
        self._number += 1
        self._pending = 0
        is_kept = not self._options.difference
        push = Push(self._number, self._change(), self._rules, self._present, is_kept=is_kept)
        waits = not self._options.backup or waits_for_step(self._calls, self.store.version)
        self.store.push_together(push, self._label, waits=waits)
        self.fetch()

    def _step_alone(self) -> None:
        options = self._options
        if self._accrued is not self._gradients:
            for accrued, gradient in zip(self._accrued, self._gradients, strict=True):
                np.add(accrued, gradient, out=accrued)
        fetches = self._calls % options.fetch_every == 0
        at_once = fetches and options.bound is None and self._pending >= options.push_every
        if self._pending >= options.push_every:
            self._push(self._receiver() if at_once else None)
        self.store.finish_step(options.bound)
        if fetches and not at_once:
            self.fetch()
        elif not fetches and not options.difference:
            self._descend()

    def _push(self, receiver: Callable[[int], Callable[[Array], None]] | None) -> None:
        self._number += 1
        self._pending = 0
        versions = tuple(self._versions) if self._options.modulates else None
        is_kept = not self._options.difference
        push = Push(self._number, self._change(), self._rules, self._present, self._factor, versions, is_kept)
        applied = self.store.push_all(self._order, push, receiver)
        if receiver is not None:
            self._note(applied)
        if self._accrued is not self._gradients:
            for accrued in self._accrued:
                accrued[:] = 0

    def _note(self, versions: Mapping[int, int]) -> None:
        for index, version in versions.items():
            self._versions[index] = version

    def _descend(self) -> None:
        """Step by the plain gradient, until parameters are fetched again, as the workers of Downpour SGD do."""
        for shard in self.store.shards:
            for piece in shard.pieces:
                if self._present[piece.parameter] and (rate := self._rules[piece.parameter].local_rate):
                    begin = shard.begin + piece.start
                    gradient = self._gradients[shard.memory][begin : shard.begin + piece.stop]
                    self._targets[piece.parameter][piece.first : piece.first + len(gradient)] -= rate * gradient

    def _change(self) -> Callable[[StoreShard], Array]:
        return self._differences if self._options.difference else self._flat_change

    def _differences(self, shard: StoreShard) -> Array:
        fetched = self._fetched[shard.memory][shard.begin : shard.begin + shard.count]
        difference = self._difference[fetched.dtype.name][: shard.count]
        difference[:] = 0
        for piece in shard.pieces:
            own = self._targets[piece.parameter][piece.first : piece.first + piece.stop - piece.start]
            part = slice(piece.start, piece.stop)
            np.subtract(own, fetched[part], out=difference[part])
            fetched[part] = own  # from now on the difference is counted from here
        return difference

    def _receiver(self) -> Callable[[int], Receive]:
        return self._keep_difference if self._options.difference else self._flat_targets

    def _keep_difference(self, index: int) -> Receive:
        shard = self.store.shards[index]
        copy_to_targets = self._flat_targets(index)
        fetched = self._fetched[shard.memory][shard.begin : shard.begin + shard.count]

        def receive(values: Array) -> None:
            if self._pending:
                for place in self._flat_targets.places[index]:
                    span = slice(place.piece.start, place.piece.stop)
                    place.target += values[span] - fetched[span]
            else:
                copy_to_targets(values)
            fetched[:] = values

        return receive


def _largest(shards: Sequence[StoreShard]) -> int:
    return max((shard.count for shard in shards), default=0)
