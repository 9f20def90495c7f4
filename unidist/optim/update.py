"""The updates of one optimizer: the exchange and post-processing of gradients before the inner step.

Framework-free; a binding (`BindsOptimizers`) calls it in this order:

    weigh(total)        before the gradients of a pass whose loss is weighted
    is_repeated(i)      before a gradient is written: another backward pass has begun, call `end_extra_pass()` first
    gradient_ready(i)   for every gradient of a backward pass, when it is in `buffer(i)`
    begin_step()        the script calls `step`: does this pass complete an update?
    finish()            if so: complete the exchange (or earlier, when the script calls `synchronize`)
    conclude()          unscale, check for overflow, clip, as the strategies require
    ...                 the inner step, unless `overflowed`: the binding; around it `actors`, if there are any
    applied()           the inner step is done; or reset_window(), if it was skipped

Its `window` decides which passes complete an update, its `GradientFactors` compute the factors of the sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from unidist.buffer import Buffer, DType
from unidist.errors import ConfigurationError, PeerLostError, UsageError
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.interface import GradientExchange, ReducedGradients
from unidist.gradients.options import ExchangeOptions
from unidist.gradients.series import ExchangeSeries
from unidist.mesh import REPLICA_AXES
from unidist.optim.accumulation import Accumulation, Window
from unidist.optim.actors import Actors, ActsOnParameters, TrainedState
from unidist.optim.interface import ChecksBeforeSave
from unidist.optim.loss_weights import BoundUpdates
from unidist.optim.scaling import GradientFactors
from unidist.optim.script_position import NUM_FLAGS, ScriptPosition, notice_of

if TYPE_CHECKING:
    from unidist.communicator import Communicator
    from unidist.optim.interface import BringsInnerStep, FollowsUpdates, KnowsHolders
    from unidist.optim.loss_scaling import LossScaler
    from unidist.optim.rules import GradientRule, GradientRules
    from unidist.runtime_api import RuntimeAPI

MakesExchange = Callable[[Sequence[ParameterInfo], ExchangeOptions], GradientExchange]
"""Builds the exchange for a list of parameters with these options. Collective."""


@dataclass(frozen=True)
class UpdateParts:
    """The parts of an update that belong to one runtime, and are made again for the next one.

    Args:
        context: the runtime.
        make_exchange: builds exchanges.
        rules: post-processing of the reduced gradients before the inner step; None: there is none.
    """

    context: RuntimeAPI
    make_exchange: MakesExchange
    rules: GradientRules | None = None


class Update:
    """The framework-free part of a distributed optimizer.

    Args:
        context: the runtime.
        make_parts: makes the parts that belong to a runtime, again in each generation of an elastic job. Collective.
        accumulation: of backward passes into updates.
        average: the gradients of the ranks are averaged, else added up.
        strategies: notified of every update.
        options: the script's options of the exchange, among them its process set.
        inner_steps: the strategy that brings inner steps; None: every rank updates with all reduced gradients.
        in_backward: complete the exchange at the end of the backward pass, so that the script sees reduced gradients
            after it; else at `step` or `synchronize`, so that ranks may call backward different numbers of times.
        places: of the parameters, by their names, if a strategy has divided the model; None: every rank holds all.
            It says how many ranks hold a parameter, and over which ranks its gradient is summed.
        steps_alone: see `GradientOwner.steps_alone`.

    Attributes:
        options: an inner step may replace them before the first exchange is made.
        places: see Args.
        steps_alone: see Args.
        window: the passes of the present update; read-only for others.
        position: the place of the ranks' scripts, compared with each update.
        actors: those that act on the parameters between two updates, whom a binding calls around its inner step; None:
            nobody does.
        syncs: gradients are exchanged as they become ready; False: they stay on this rank until a backward pass with
            True, or `finish`. The same on every rank.
        losses_divided_by: a trainer divides the loss of each pass by this, which is no weight: that is undone where
            losses are weighted. The same on every rank.
    """

    def __init__(
        self,
        context: RuntimeAPI,
        make_parts: Callable[[RuntimeAPI], UpdateParts],
        *,
        accumulation: Accumulation,
        average: bool = True,
        strategies: Sequence[FollowsUpdates] = (),
        options: ExchangeOptions | None = None,
        inner_steps: BringsInnerStep | None = None,
        in_backward: bool = False,
        places: KnowsHolders | None = None,
        steps_alone: bool = False,
    ) -> None:
        self.average = average
        self.steps_alone = steps_alone
        self.strategies = strategies
        self.inner_steps = inner_steps
        self.in_backward = in_backward
        self.options = options or ExchangeOptions()
        self.places = places
        self.step = 0
        self.syncs = True
        self.losses_divided_by = 1.0
        self._trained: TrainedState | None = None
        self._make_parts = make_parts
        self._own_exchange: MakesExchange | None = None
        self.actors: Actors | None = None
        self._begin(context, accumulation, scaler=None)

    def _begin(self, context: RuntimeAPI, accumulation: Accumulation, *, scaler: LossScaler | None) -> None:
        """Make what belongs to one runtime. Collective."""
        self._find_actors()
        self._parts = self._make_parts(context)
        self.num_ranks = self.options.num_ranks(context)
        self._series = ExchangeSeries()
        self._factors = GradientFactors(self._parts.rules, num_ranks=self.num_ranks, average=self.average)
        self._factors.keep_scaler(scaler)
        self._watch = None if self._parts.rules is None else self._parts.rules.watch
        self.window = Window(accumulation)
        self.position = ScriptPosition(context)
        self._communicator: Communicator | None = None
        context.owned(BoundUpdates).add(self)

    @property
    def context(self) -> RuntimeAPI:
        """The runtime of the present generation."""
        return self._parts.context

    @property
    def trained(self) -> TrainedState:
        """Access to the parameters and the optimizer's state; the binding sets it.

        Raises:
            ConfigurationError: this adapter has none.
        """
        if self._trained is None:
            names = "a strategy" if self.actors is None else self.actors.names
            raise ConfigurationError(
                f"{names} acts on parameters between two updates, and this binding of optimizers gives no access "
                "to them (`Update.trained`; Keras on JAX and optimizers of TF1 have none). Leave it out, or use "
                "KERAS_BACKEND=tensorflow, or unidist.jax with an optimizer of optax"
            )
        return self._trained

    @trained.setter
    def trained(self, state: TrainedState) -> None:
        self._trained = state

    @property
    def accumulation(self) -> Accumulation:
        """The accumulation of backward passes into updates."""
        return self.window.accumulation

    @property
    def parameters(self) -> list[ParameterInfo]:
        """The parameters whose gradients are exchanged."""
        return self._series.parameters

    @property
    def communicator(self) -> Communicator:
        """A communicator over the ranks that exchange gradients, for the binding. Collective at the first access."""
        if self.options.process_set is None:
            return self.context.axis(REPLICA_AXES)
        if self._communicator is None:
            self._communicator = self.options.communicator(self.context)
        return self._communicator

    @property
    def exchanges(self) -> Sequence[GradientExchange]:
        """One or more for each call of `add_parameters`; parameters are numbered consecutively."""
        return self._series.exchanges

    def add_parameters(self, parameters: Sequence[ParameterInfo]) -> None:
        """Exchange the gradients of these parameters too, numbered after the earlier ones. Collective.

        Neighbours of one `gradient_axis` share an exchange: give the parameters in the order of `in_groups`.
        """
        if not parameters and self.exchanges:
            return
        if self.places is not None:
            parameters = [
                replace(
                    each,
                    copies=self.places.copies(each.name),
                    gradient_axis=self.gradient_axis(each.name),
                    cut_axis=self.places.cut_axis(each.name),
                )
                for each in parameters
            ]
        groups = [list(group) for _, group in itertools.groupby(parameters, key=lambda each: each.gradient_axis)]
        if not self.exchanges and (not groups or groups[0][0].gradient_axis != REPLICA_AXES):
            groups.insert(0, [])  # one exchange is over all replicas, so that a notice reaches all of them
        for group in groups:
            self._series.add(self._new_exchange(group))
        self.window.add_parameters(len(parameters))

    def gradient_axis(self, name: str) -> str:
        """Return the mesh axis over whose ranks the gradient of a parameter is summed."""
        if self.places is None or self.options.process_set is not None:
            return REPLICA_AXES
        return self.places.gradient_axis(name)

    def in_groups(self, names: Sequence[str]) -> list[int]:
        """Return the positions of parameters, so that those that share an exchange are neighbours.

        The same on every rank. Within a group the order is kept; the first group is exchanged with all replicas.
        """
        axes = [self.gradient_axis(name) for name in names]
        return sorted(range(len(names)), key=lambda position: (axes[position] != REPLICA_AXES, axes[position]))

    def check_dense(self, name: str) -> None:
        """Raise UsageError if a gradient that turned out to be sparse cannot be exchanged."""
        if self.gradient_axis(name) != REPLICA_AXES:
            raise UsageError(
                f"the gradient of {name!r} is sparse, and this parameter is divided over ranks whose gradients are "
                "summed in groups, which dense ones can be. Make the embedding with sparse=False"
            )

    @property
    def bucket_bytes(self) -> int | None:
        """Size of the buckets; None if the exchange has none whose size can be chosen."""
        return self.exchanges[0].bucket_bytes if self.exchanges else None

    def make_exchanges_by(self, make_exchange: MakesExchange) -> None:
        """Use this factory of exchanges, for bindings with another kind of exchange. Call it before the first one."""
        assert not self.exchanges, "there are exchanges already"
        self._own_exchange = make_exchange

    def set_bucket_bytes(self, bucket_bytes: int) -> None:
        """Change the size of the buckets, after `finish` and before the next round. Collective.

        Afterwards every `buffer` is a new one; the contents of the old ones are not copied.
        """
        assert not self.window.in_round, "buckets are changed between two rounds"
        self.options = replace(self.options, bucket_bytes=bucket_bytes)
        self._series.replace(self._new_exchange)

    def _new_exchange(self, parameters: Sequence[ParameterInfo]) -> GradientExchange:
        make_exchange = self._own_exchange or self._parts.make_exchange
        exchange = make_exchange(parameters, self._options_of(parameters))
        exchange.scale = self._factors.of_exchange(exchange, self.scale)
        return exchange

    def _options_of(self, parameters: Sequence[ParameterInfo]) -> ExchangeOptions:
        axis = parameters[0].gradient_axis if parameters else REPLICA_AXES
        return self.options if axis == self.options.gradient_axis else replace(self.options, gradient_axis=axis)

    @property
    def rules(self) -> GradientRules | None:
        """The post-processing of reduced gradients before every inner step; None: there is none."""
        return self._factors.rules

    @property
    def is_local(self) -> bool:
        """Whether the next exchange involves no other rank. The same on every rank."""
        return bool(self.exchanges) and all(exchange.is_local for exchange in self.exchanges)

    @property
    def shares_notice(self) -> bool:
        """Whether the ranks learn each other's flags at the next exchange. The same on every rank."""
        return all(exchange.shares_notice for exchange in self.exchanges)

    @property
    def overflowed(self) -> bool:
        """Whether a reduced gradient was not finite: no rank steps, and the binding skips the inner step."""
        return self._factors.overflowed

    @property
    def scaler(self) -> LossScaler | None:
        """The scaler of the loss, if it is scaled. A checkpoint keeps its `state`."""
        return self._factors.scaler

    def repeat_factor(self, index: int) -> float:
        """Return the factor with which the reduced gradient of parameter `index` may be exchanged once more.

        If every rank multiplies it by this, and adds the gradient of another pass, the next exchange gives their sum.
        """
        exchange = self._series.places[index][0]
        num_ranks = self._options_of(exchange.parameters).num_ranks(self.context)
        return 1.0 / (self._factors.unscaled(exchange) * self._factors.of_window(self.accumulation) * num_ranks)

    @property
    def repeats_unchanged(self) -> bool:
        """Whether `repeat_factor` is always 1: the mean over ranks of a mean is the mean."""
        over_all = all(each.gradient_axis == REPLICA_AXES for each in self.parameters)
        return self.average and self.scaler is None and over_all

    def whole_scale(self, scale: float | None) -> float:
        """Return the factor for sums that the binding exchanges itself: `scale`, default `self.scale`, and unscaled."""
        return (self.scale if scale is None else scale) / self._factors.loss_scale

    def buffer(self, index: int) -> Buffer:
        """Return the buffer for the gradient of parameter `index`."""
        exchange, local = self._series.places[index]
        return exchange.buffer(local)

    def early_bucket(self, index: int) -> tuple[GradientExchange, int] | None:
        """Return the exchange and the number of the bucket that starts when all of its gradients are ready, or None."""
        exchange, local = self._series.places[index]
        number = exchange.early_bucket(local)
        return None if number is None else (exchange, number)

    def buffer_moves(self, index: int) -> bool:
        """Return whether the buffer of parameter `index` is a new one in every pass: get it just before writing."""
        return self._series.places[index][0].buffers_move

    @property
    def scale(self) -> float:
        """The factor that turns a full window's sum into the gradient of the update."""
        weights = self.window.weights
        if weights.total:
            return self._factors.of_weighted_window(weights)
        return self._factors.of_window(self.accumulation)

    def weigh(self, total: float) -> float:
        """Begin a pass whose loss is weighted; returns the number by which it is to be divided.

        The gradient of the update is then that of sum(losses) / sum(weights) over all ranks and passes of the window,
        if each rank's loss is its mean times its weight, times the number of ranks where gradients are averaged, and
        divided by this. Call it on every rank just before the gradients of the pass.

        Args:
            total: the sum of the weights of all ranks in this pass; of this rank if ranks step alone.

        Raises:
            UsageError: several passes make an update, and one of them is a sum of losses with different weights.
        """
        divisor, scale = self.window.weigh(total), self.scale
        for exchange in self.exchanges:
            exchange.rescale(self._factors.of_exchange(exchange, scale))
        return divisor / self.losses_divided_by

    def has_gradient(self, index: int) -> bool:
        """Return whether the buffer of parameter `index` has a gradient of the current window, to which to add."""
        exchange, local = self._series.places[index]
        return self.window.has_passes(index) and exchange.holds(local)

    def is_repeated(self, index: int) -> bool:
        """Return whether the gradient of parameter `index` was exchanged in this round, so that a new one must wait."""
        exchange, local = self._series.places[index]
        return exchange.adds_passes and self.window.adds_extra_passes and exchange.was_ready(local)

    def end_extra_pass(self) -> None:
        """Complete the exchange of one of several backward passes before `step`; its result is kept. Collective."""
        with self._reporting_failure():
            self._series.end_pass(is_extra=True)
        self.window.end_extra_pass()

    def gradient_ready(self, index: int) -> None:
        """Note that the gradient of parameter `index` is in its buffer; in the last pass the exchange may start."""
        last = self.window.is_last_pass(index)
        exchange, local = self._series.places[index]
        self.window.count_pass(index, exchange.parameters[local].name)
        if not self.window.in_round:
            self._begin_round()
        if self._watch is not None:
            self._watch.look_at_own(exchange.parameters[local].name, exchange.buffer(local))
        if self.syncs and (last or exchange.reduces_each_pass):
            exchange.ready(local)
        else:
            exchange.accumulate(local)

    def accumulate(self, index: int) -> None:
        """Report a gradient in the buffer of parameter `index` that does not come from a backward pass."""
        exchange, local = self._series.places[index]
        self._begin_round()
        exchange.accumulate(local)

    def pass_without_buffer(self, index: int) -> None:
        """Note a pass whose gradient the binding exchanges itself (a sparse one)."""
        exchange, local = self._series.places[index]
        self.window.count_pass(index, exchange.parameters[local].name)
        self._begin_round()

    def _begin_round(self) -> None:
        """Give the exchanges the present loss scale, which an update or a checkpoint may have changed."""
        if self.window.in_round:
            return
        self.window.in_round = True
        if self._factors.rules is not None and self.scaler is not None:
            self._set_scales()

    def _set_scales(self) -> None:
        for exchange in self.exchanges:
            exchange.scale = self._factors.of_exchange(exchange, self.scale)

    @property
    def completes_window(self) -> bool:
        """True when the next `step` updates the parameters."""
        return self.window.completes

    def begin_step(self) -> bool:
        """Count a call of `step` and return whether it updates the parameters.

        Collective where `reduces_each_pass`.
        """
        if self.window.count_step():
            return True
        if self.syncs:
            self.end_pass()
        return False

    @property
    def reduces_each_pass(self) -> bool:
        """Whether all passes of a window are exchanged, not only the last."""
        return self._series.reduces_each_pass

    def end_pass(self) -> None:
        """Complete the exchange of a pass that is not the last of its window, if `reduces_each_pass`. Collective."""
        with self._reporting_failure():
            self._series.end_pass()

    def look_at_loss(self, loss: float) -> None:
        """Let `--on-nonfinite` tell of the loss of a pass of this rank, before the update."""
        if self._watch is not None:
            self._watch.look_at_loss(loss)

    def finish(
        self,
        *,
        flags: bytes = bytes(NUM_FLAGS),
        scale: float | None = None,
        first_parameter: int = 0,
        is_joined: bool = False,
    ) -> tuple[list[bool], bytes]:
        """Complete the exchange. Collective over the data axis.

        Args:
            flags: `NUM_FLAGS` bytes; every rank learns the largest of all ranks' for each of them.
            scale: factor for the sums; default: `self.scale`.
            first_parameter: skip the exchanges of the parameters before this one, which are complete already.
            is_joined: this rank has joined, and takes part in an update of the others.

        Returns:
            Per parameter from `first_parameter` on, whether any rank had a gradient; and the largest flags.

        Raises:
            MismatchError: on all ranks; one of them has left a step or a batch out.
            UsageError: this rank has joined, and somebody acts on parameters, of which it has old ones.
        """
        if is_joined and self.actors is not None:
            raise UsageError(
                f"rank {self.context.topology.rank} has joined, and {self.actors.names} acts on parameters after each "
                "update of the others, while those of this rank stay as they are: give every rank equally many batches"
            )
        self.context.recorder.end("backward")
        self._begin_round()
        is_first, is_shared = first_parameter == 0, self.shares_notice
        place = self.position.place(self.step + 1, self.window.num_passes) if is_first and not is_joined else None
        with self._reporting_failure():
            present, largest = self._series.finish(
                lambda exchange: None if scale is None else self._factors.of_exchange(exchange, scale),
                notice=notice_of(flags, place),
                first_parameter=first_parameter,
            )
        self.window.finish_round()
        if is_first and is_shared:
            self.position.check(place, largest)
        self.context.recorder.begin("step")
        return present, largest[:NUM_FLAGS]

    @contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        """Report a lost peer to plugins."""
        try:
            yield
        except PeerLostError as exc:
            self.context.report_failure(exc)
            raise

    def conclude(self, others: Sequence[ReducedGradients] = ()) -> None:
        """Post-process the reduced gradients of the window: unscale, check for overflows, clip.

        The binding calls it once per window, after the last `finish`. Collective over all ranks of the model.

        Args:
            others: gradients that the binding has reduced itself, with the factor `whole_scale`: sparse ones, each row
                once. Equal on all ranks unless `divided_over` is set; not deferred.
        """
        self._factors.conclude(self._series, others, step=self.step + 1, values=lambda: self.trained.values())

    def apply_once(self, rule: GradientRule, others: Sequence[ReducedGradients] = ()) -> bool:
        """Let a rule change the gradient of this update alone, between `conclude` and the inner step. Collective.

        Args:
            rule: as one of a strategy, which changes the gradient of every update.
            others: see `conclude`.

        Returns:
            Whether it was applied: a gradient that has overflowed is not changed.
        """
        return self._factors.apply_once(
            self._series, rule, others, step=self.step + 1, values=lambda: self.trained.values()
        )

    def follow(self, follower: FollowsUpdates) -> None:
        """Notify one more object of every update, after the strategies."""
        self.strategies = (*self.strategies, follower)
        self._find_actors()

    def _find_actors(self) -> None:
        acting = [each for each in self.strategies if isinstance(each, ActsOnParameters)]
        self.actors = Actors(self, acting) if acting else None

    def before_save(self) -> None:
        """Let those that follow the updates look at the state before a checkpoint. Collective."""
        for follower in self.strategies:
            if isinstance(follower, ChecksBeforeSave):
                follower.before_save()

    def before_load(self) -> None:
        """Let those that follow the updates know that a checkpoint is about to be loaded. Collective."""
        for follower in self.strategies:
            if isinstance(follower, ChecksBeforeSave):
                follower.before_load()

    def applied(self) -> None:
        """Start the next window, after the inner step."""
        context = self.context
        context.recorder.end("step")
        self.reset_window()
        self.step += 1
        if self.actors is not None:
            self.actors.count_update()
        for strategy in self.strategies:
            strategy.on_step(self.step)
        context.step_applied(self.step)

    def reset_window(self) -> None:
        """Start the next window without an update: the passes of the current one are dropped."""
        was_weighted = bool(self.window.weights.total)
        self.window.reset()
        if was_weighted:
            self._set_scales()

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes of the next updates. Every rank calls it between the same two updates.

        Raises:
            UsageError: the passes are counted by a strategy, or there are gradients that were not applied.
        """
        if self.accumulation.stepwise and self.accumulation.passes > 1:
            raise UsageError(
                f"the strategy accumulate={self.accumulation.passes} counts the passes of this optimizer; leave it out "
                "to count them in the script"
            )
        if passes > 1 and self.reduces_each_pass:
            raise UsageError(
                f"{passes} backward passes per step, counted by the script, and a strategy that reduces every pass by "
                "itself (zero=2, zero=3): use --strategy accumulate=N beside it, or zero=1"
            )
        if self.window.in_round:
            raise UsageError(
                "the number of backward passes per step was changed between backward() and step(); change it before "
                "the first backward() of an update"
            )
        self.window.change(Accumulation(passes, average=False, stepwise=False))

    def accumulate_steps(self, steps: int) -> None:
        """Add up this many passes in each of the next updates, with a call of `step` after each pass.

        Every rank calls it between the same two updates. From then on no strategy counts the passes.
        """
        wanted = Accumulation(steps, average=False)
        if wanted != self.accumulation:
            self.window.change(wanted)
            self._set_scales()

    def short_window_scale(self) -> float | None:
        """Return the factor for a window that ends early, or None if no rank has anything in it. Collective.

        With `average` the mean is over the passes of all ranks together, unless weights divide their sum.
        """
        counts = Buffer.allocate(1, DType.INT64)
        passes = counts.bytes().cast("q")
        passes[0] = self.window.num_passes
        self.communicator.allreduce(counts, counts).wait()
        if passes[0] == 0:
            return None
        self.window.was_complete = True
        if self.window.weights.total:
            return self.scale
        return self._factors.of_short_window(self.accumulation, passes[0])

    def rebind(self, context: RuntimeAPI) -> None:
        """Continue in another runtime, without parameters; an unfinished window is discarded. Collective.

        The number of updates, the passes of a window and the loss scale stay; see `unidist.elastic.rebinding`.
        """
        accumulation, scaler = self.accumulation, self.scaler
        self.close()
        self._begin(context, accumulation, scaler=scaler)

    def close(self) -> None:
        """Release buffers and communicators."""
        self._series.close()
        self._factors.close()
        if self._communicator is not None:
            self._communicator.close()


def update_of(optimizer: Any) -> Update | None:
    """Return the update that an optimizer is bound to; None: it is not distributed."""
    found: Update | None = getattr(getattr(optimizer, "_unidist", None), "distributed_update", None)
    return found
