"""Synchronizes the parameters of one optimizer: where a window began, what is exchanged when, and the outer step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unidist.buffer import HOST, Buffer, DType, device_kind
from unidist.errors import ConfigurationError, PeerLostError, StalledError, UsageError
from unidist.mesh import DATA_AXIS
from unidist.negotiation import gather_objects
from unidist.optim import ActsOnParameters, ChecksBeforeSave, KeepsTensors, OutlivesGenerations, update_of
from unidist.training import EndOfRun
from unidist_local_sgd.exchange import GroupExchange
from unidist_local_sgd.fragment import FragmentExchange
from unidist_local_sgd.generations import Kept, average, copies, from_first, shared_names
from unidist_local_sgd.schedule import Due, divide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from unidist.communicator import Communicator
    from unidist.framework import Framework
    from unidist.gradients import ExchangeOptions, GradientExchange, ParameterInfo
    from unidist.optim import TrainedState, Update
    from unidist.runtime_api import RuntimeAPI
    from unidist_local_sgd.strategy import LocalSGD

_WIDE_BYTES = 4
"""Values of fewer bytes for each element are exchanged, and kept at the start of a window, in float32."""


def synchronizer_of(update: Update) -> Synchronizer | None:
    """Return the synchronizer of an update; None under another strategy."""
    return next((each for each in update.strategies if isinstance(each, Synchronizer)), None)


def synchronize(optimizer: Any) -> bool:
    """End the present window: synchronize the parameters of an optimizer, which are equal on all ranks afterwards.

    For the end of training, and before a model is evaluated or exported. Collective: every rank calls it between the
    same two updates. The optimizer's state stays each rank's own.

    Args:
        optimizer: as `distribute` has returned it, or a `TrainStep`.

    Returns:
        Whether the strategy of the optimizer is `local_sgd`; under another one nothing is done.

    Raises:
        UsageError: it is an optimizer of optax, see `unidist_local_sgd.jax.synchronize`.
    """
    update = update_of(optimizer) or update_of(getattr(optimizer, "optimizer", None))
    synchronizer = None if update is None else synchronizer_of(update)
    if synchronizer is not None and update is not None:
        if not update.trained.is_at_hand:
            raise UsageError(
                "arrays of JAX do not change, and the script has them: use unidist_local_sgd.jax.synchronize"
            )
        synchronizer.end_window()
    return synchronizer is not None


@dataclass
class _Run:
    """What the end of a run has to know of a synchronizer, which may be gone by then.

    Args:
        every: updates between two synchronizations.
        num_updates: that each rank has made alone.
        has_synchronized: at least once.
    """

    every: int
    num_updates: int = 0
    has_synchronized: bool = False

    def never_synchronized(self) -> str:
        """Return a sentence about a run that was too short; "" for another one."""
        if self.has_synchronized or not self.num_updates:
            return ""
        return (
            f"local_sgd={self.every}: the run ends after {self.num_updates} updates, and the ranks are synchronized "
            f"after each {self.every}, so each has trained alone, and their parameters differ. Give "
            f"local_sgd={self.num_updates} or less, or end with unidist_local_sgd.synchronize(optimizer)"
        )


class Synchronizer(ActsOnParameters, ChecksBeforeSave, KeepsTensors, OutlivesGenerations):
    """See the module's text. Follows the updates of the optimizer.

    A checkpoint ends the window: before it is written all parameters are synchronized, and the ranks' optimizer states
    averaged, so that training goes on in the same way whether it is resumed from the checkpoint or not. So does a
    change of the ranks of an elastic job, over those that hold the last commit.

    Args:
        strategy: its options.
        update: the framework-free side of the optimizer.
        framework: does the arithmetic.
    """

    name = "local_sgd.outer"

    def __init__(self, strategy: LocalSGD, update: Update, framework: Framework) -> None:
        self._strategy = strategy
        self._schedule, self._outer = strategy.schedule, strategy.outer_optimizer
        self._update = update
        self._framework = framework
        self._due = Due((), ())
        self._position = 0  # updates since all parameters were equal
        self._slots_differ = False  # the ranks' optimizers have different state
        self._step = 0
        self._run = _Run(strategy.every)
        self._parameters: tuple[ParameterInfo, ...] = ()
        self._fragments: list[tuple[range, FragmentExchange]] = []
        self._communicators: dict[str, Communicator] = {}
        self._starts: list[Buffer] = []
        self._velocities: list[Buffer] = []
        self._loaded: Mapping[str, tuple[Sequence[int], Buffer]] = {}
        self._home = weakref.ref(update.context)  # the generation in which training began on this rank
        self._begun_in: Callable[[], RuntimeAPI | None] = _nowhere
        self._synchronized_in: Callable[[], RuntimeAPI | None] = _nowhere
        update.make_exchanges_by(self._make_exchange)
        update.follow(self)
        if not update.context.is_elastic:
            update.context.owned(EndOfRun).watch(self._run.never_synchronized)

    # Set-up

    @property
    def needs_begin(self) -> bool:
        """Whether `begin` was not called since the optimizer was bound, or the ranks have changed."""
        return self._begun_in() is not self._update.context

    def _make_exchange(self, parameters: Sequence[ParameterInfo], options: ExchangeOptions) -> GradientExchange:
        update = self._update
        made = self._strategy.make_exchange(parameters, update.context, self._framework, options)
        if isinstance(made, GroupExchange):
            made.update = update
        return made

    def begin(self, parameters: Sequence[ParameterInfo]) -> None:
        """Set up the exchange of these parameters, which are equal on all ranks. Collective.

        Called again for other parameters, after `end_window`, and in each generation of an elastic job.

        Raises:
            ConfigurationError: there are fewer parameters than fragments; the job is elastic, and the optimizer's state
                is not at hand between two steps.
        """
        count = self._schedule.fragments
        if self._update.context.is_elastic and not self._update.trained.is_at_hand:
            raise ConfigurationError(
                "local_sgd with JAX cannot be in an elastic job; PyTorch and Keras on TensorFlow can. Leave --min-np "
                "out, and save checkpoints"
            )
        if len(parameters) < count:
            raise ConfigurationError(
                f"local_sgd:fragments={count}: the optimizer has {len(parameters)} parameters, and a fragment has at "
                "least one; give fewer fragments"
            )
        framework, update = self._framework, self._update
        if self.needs_begin:
            self._communicators = {}
        self._begun_in = weakref.ref(update.context)
        wide = [replace(each, dtype=_wide(each.dtype)) for each in parameters]
        kinds = {HOST: HOST}
        if (device := device_kind(each.memory for each in wide)) is not None:
            kinds["device"] = device
        for memory in sorted(kinds.keys() - self._communicators.keys()):
            self._communicators[memory] = update.options.communicator(update.context, memory=kinds[memory])
        for _, exchange in self._fragments:
            exchange.close()
        self._parameters = tuple(wide)
        compressor = self._strategy.compressor(update.context.plugins)
        self._fragments = [
            (
                indices,
                FragmentExchange(
                    [self._parameters[index] for index in indices],
                    framework=framework,
                    communicators=self._communicators,
                    compressor=compressor,
                ),
            )
            for indices in divide([each.count for each in wide], count)
        ]
        if self._strategy.is_relative:
            for each in wide[len(self._starts) :]:  # those before stay as they are
                self._starts.append(framework.allocate(each.count, each.dtype, each.memory))
        if self._outer.has_momentum:
            for each in wide[len(self._velocities) :]:
                self._velocities.append(framework.allocate(each.count, each.dtype, each.memory))
            self.load_tensors(self._loaded)

    # Updates

    @override
    def acts_before(self, step: int, update: Update) -> bool:
        """Return whether a window begins. Collective where parameters are new, or the ranks.

        Raises:
            UsageError: the ranks have changed, and no elastic state has the optimizer.
        """
        self._check_generation()
        parameters = self._update.parameters
        if not self.needs_begin and len(parameters) > len(self._parameters):
            self.end_window()  # of the parameters before
            self.begin(parameters)
        elif self.needs_begin:
            self.begin(parameters)
        return self._needs_start_before(step)

    @override
    def act_before(self, step: int, update: Update, state: TrainedState) -> None:
        """Keep the values, which are equal on all ranks, as the start of the first window."""
        for value, start in zip(state.values(), self._starts, strict=True):
            self._framework.convert(value, start)

    def _needs_start_before(self, step: int) -> bool:
        return self._strategy.is_relative and self._position == 0 and step > self._strategy.after

    @property
    def differs(self) -> bool:
        """Whether parameters or optimizer state may differ between the ranks. The same on every rank."""
        return self._slots_differ or self._is_open(self._position)

    @override
    def acts_after(self, step: int, update: Update) -> bool:
        self._check_generation()
        self._step = step
        if step <= self._strategy.after:
            return False
        self._position += 1
        self._slots_differ = True
        self._run.num_updates += 1
        for _, exchange in self._fragments:
            exchange.progress()
        self._due = self._schedule.due(self._position)
        return bool(self._due)

    @override
    def act_after(self, step: int, update: Update, state: TrainedState) -> None:
        """Exchange and apply what is due. Collective over the ranks that train together."""
        due, values = self._due, state.values()
        with self._reporting_failure():
            for fragment in due.apply:
                self._apply(fragment, values, self._strategy.mix)
            for fragment in due.send:
                self._send(fragment, values)
            if not self._schedule.delay:
                for fragment in due.send:
                    self._apply(fragment, values, self._strategy.mix)
        state.store(values)

    def _check_generation(self) -> None:
        context = self._update.context
        if context is not self._home() and context is not self._synchronized_in():
            raise UsageError(
                "local_sgd: the ranks have changed, and this optimizer is in no elastic state, so the ranks differ: "
                "give it to the state, after distribute(): TorchState(model, optimizer), KerasState(model, optimizer), "
                "JaxState(params, opt_state, optimizer=optimizer)"
            )

    def _is_open(self, position: int) -> bool:
        """Return whether the ranks' parameters differ after this many updates since they were equal."""
        is_synchronized = (
            position % self._schedule.every == 0 and self._schedule.is_simultaneous and not self._strategy.mix
        )
        return position > 0 and not is_synchronized

    def end_window(self) -> None:
        """Synchronize all parameters unless they just were: they are equal on all ranks afterwards. Collective."""
        if self._is_open(self._position):
            values = self._update.trained.values()[: len(self._parameters)]
            with self._reporting_failure():
                for fragment, (_, exchange) in enumerate(self._fragments):
                    if exchange.is_pending:
                        self._apply(fragment, values, self._strategy.mix)
                for fragment in range(len(self._fragments)):
                    self._send(fragment, values)
                for fragment in range(len(self._fragments)):
                    self._apply(fragment, values, 0.0)
            self._update.trained.store(values)
        self._position = 0

    @override
    def act_at_end(self, update: Update, state: TrainedState) -> None:
        """Give all ranks the mean of what are the parameters now, without an outer step; a window begins."""
        self._run.has_synchronized = True
        values = state.values()
        with self._reporting_failure():
            for indices, exchange in self._fragments:
                exchange.wait(self._update.context.recorder.wait)
                self._exchange(indices, exchange, values, is_relative=False)
                exchange.wait(self._update.context.recorder.wait)
                for place, index in enumerate(indices):
                    self._framework.convert(exchange.buffer(place), values[index])
        state.store(values)
        self._position = 0

    def _send(self, fragment: int, values: Sequence[Buffer]) -> None:
        self._run.has_synchronized = True
        self._exchange(*self._fragments[fragment], values, is_relative=self._strategy.is_relative)

    def _exchange(
        self, indices: range, exchange: FragmentExchange, values: Sequence[Buffer], *, is_relative: bool
    ) -> None:
        """Start the exchange of a fragment's values, or of their differences to the start point."""
        framework = self._framework
        for place, index in enumerate(indices):
            target = exchange.buffer(place)
            framework.convert(values[index], target)
            if is_relative:  # the outer gradient
                framework.multiply(target, -1.0)
                framework.add(self._starts[index], target)
        exchange.start()

    def _apply(self, fragment: int, values: Sequence[Buffer], mix: float) -> None:
        """Complete an exchange, make the outer step, and mix the result with this rank's values."""
        framework = self._framework
        indices, exchange = self._fragments[fragment]
        exchange.wait(self._update.context.recorder.wait)
        for place, index in enumerate(indices):
            result = exchange.buffer(place)
            self._step_outer(index, result)
            if mix:
                own = framework.allocate(result.count, result.dtype, result.memory)
                framework.convert(values[index], own)
                framework.multiply(own, mix)
                framework.multiply(result, 1.0 - mix)
                framework.add(own, result)
            framework.convert(result, values[index])

    def _step_outer(self, index: int, result: Buffer) -> None:
        """Replace the mean of the exchanged values of a parameter by its new value."""
        if self._strategy.is_relative:
            velocity = self._velocities[index] if self._velocities else None
            self._outer.step(self._framework, self._starts[index], result, velocity)
            self._framework.convert(self._starts[index], result)

    def _average_slots(self) -> None:
        """Average the optimizer's state over the ranks. Collective.

        What some rank does not have, of a parameter that never had a gradient there, is left alone.
        """
        slots = self._update.trained.slots()
        for name in shared_names(self._update.communicator, slots):
            slot = slots[name]
            over = self._communicators[HOST if slot.memory == HOST else "device"]
            over.allreduce(slot, slot, scale=1.0 / over.size).wait()
        self._update.trained.store_slots(slots)

    @contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        try:
            yield
        except PeerLostError as exc:
            if isinstance(exc, StalledError):
                exc.add_note(
                    f"local_sgd: on rank {self._update.context.topology.rank} parameters are synchronized after its "
                    f"update {self._step}. Every rank makes equally many updates; look for one with less data."
                )
            self._update.context.report_failure(exc)
            raise

    # As one that follows the updates

    def on_step(self, step: int) -> None:
        """Do nothing: it has acted on the parameters before."""

    @override
    def before_save(self) -> None:
        """End the window.

        Raises:
            UsageError: the ranks differ, and only the script has the parameters.
        """
        if not self._update.trained.is_at_hand:
            if self.differs:
                raise UsageError(
                    "local_sgd: the ranks' parameters differ in the middle of a window, and arrays of JAX do not "
                    "change. Before save call synchronize(step), or params, opt_state = synchronize(optimizer, params, "
                    "opt_state), of unidist_local_sgd.jax"
                )
            return
        self.end_window()
        if self._slots_differ:
            with self._reporting_failure():
                self._average_slots()
            self._slots_differ = False

    @override
    def before_load(self) -> None:
        """Forget the present window: what is loaded is equal on all ranks."""
        for _, exchange in self._fragments:
            exchange.wait(self._update.context.recorder.wait)
        for velocity in self._velocities:
            self._framework.zero(velocity)
        self._position = 0
        self._slots_differ = False

    def state(self) -> dict[str, Any]:
        """Return nothing: at a checkpoint a window begins."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Do nothing."""

    @override
    def tensors(self) -> Mapping[str, tuple[Sequence[int], Buffer]]:
        """Return the outer momentum of each parameter, by its number: paths of Keras differ between two models."""
        found = {}
        for number, velocity in enumerate(self._velocities):
            held = velocity
            if velocity.memory != HOST:
                held = self._framework.allocate(velocity.count, velocity.dtype, HOST)
                self._framework.convert(velocity, held)
            found[f"momentum.{number}"] = (self._parameters[number].shape, held)
        return found

    @override
    def load_tensors(self, found: Mapping[str, tuple[Sequence[int], Buffer]]) -> None:
        self._loaded = {} if self._parameters else found  # until `begin`
        for number, velocity in enumerate(self._velocities):
            shape, memory = found.get(f"momentum.{number}", ((), velocity))
            if tuple(shape) == self._parameters[number].shape:
                self._framework.convert(memory, velocity)

    # Generations of an elastic job

    @override
    def kept(self) -> Kept:
        starts = self._starts if self._position else ()
        return Kept(
            self._position,
            self._slots_differ,
            copies(self._framework, starts),
            copies(self._framework, self._velocities),
        )

    @override
    def restore(self, kept: Kept) -> None:
        self._position, self._slots_differ = kept.position, kept.slots_differ
        for start, copy in zip(self._starts, kept.starts, strict=False):
            self._framework.convert(copy, start)
        for velocity in self._velocities[len(kept.velocities) :]:
            self._framework.zero(velocity)
        for velocity, copy in zip(self._velocities, kept.velocities, strict=False):
            self._framework.convert(copy, velocity)

    @override
    def make_equal(self) -> None:
        self.before_save()

    @override
    def synchronize_generation(self, context: RuntimeAPI) -> None:
        """End the window over those ranks that hold the same commit as rank 0, as a checkpoint does."""
        communicator = context.axis(DATA_AXIS)
        mine = (self._update.step, self._position, self._slots_differ)
        everyone: list[tuple[int, int, bool]] = gather_objects(communicator, mine)
        step, position, slots_differ = everyone[0]
        holders = [rank for rank, each in enumerate(everyone) if each == everyone[0]]
        members = communicator.split(holders if communicator.rank in holders else ())
        if members is not None:
            if self._is_open(position):
                self._end_window_among(members)
            if slots_differ:
                slots = self._update.trained.slots()
                for name in shared_names(members, slots):
                    average(members, self._framework, slots[name])
                self._update.trained.store_slots(slots)
            members.close()
        momentum = from_first(communicator, self.tensors())
        if communicator.rank:
            for velocity in self._velocities:
                self._framework.zero(velocity)
            self.load_tensors(momentum)
        if self._begun_in() is context:  # else `begin` makes other exchanges, and one under way is given up
            for _, exchange in self._fragments:
                exchange.wait(context.recorder.wait)
        self._update.step = self._step = step
        self._position, self._slots_differ = 0, False
        self._synchronized_in = weakref.ref(context)

    def _end_window_among(self, members: Communicator) -> None:
        """Synchronize all parameters at once among some ranks, all of which call this."""
        values = self._update.trained.values()[: len(self._parameters)]
        for index, (info, value) in enumerate(zip(self._parameters, values, strict=True)):
            result = self._framework.allocate(info.count, info.dtype, info.memory)
            self._framework.convert(value, result)
            if self._strategy.is_relative:
                self._framework.multiply(result, -1.0)
                self._framework.add(self._starts[index], result)
            average(members, self._framework, result)
            self._step_outer(index, result)
            self._framework.convert(result, value)
        self._update.trained.store(values)


def _nowhere() -> RuntimeAPI | None:
    """Stand for a weak reference to no runtime."""
    return None


def _wide(dtype: DType) -> DType:
    return DType.FLOAT32 if dtype.is_floating and dtype.itemsize < _WIDE_BYTES else dtype
