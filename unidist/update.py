"""One optimizer's updates: which backward passes make one, and what happens before the inner step.

Framework-free; a binding (`Framework.bind_update`) calls it in this order:

    gradient_ready(i)   for every gradient of a backward pass, when it lies in `buffer(i)`
    begin_step()        the script calls `step`: does this pass complete an update?
    finish()            then: complete the exchange (or earlier, when the script calls `synchronize`)
    conclude()          unscale, overflow check, clip: what the strategies ask for
    ...                 the inner step, unless `overflowed`: the binding
    applied()           the inner step is done; or skipped(), where it was left out

Two ways to accumulate, told apart by who counts. *Stepwise* (`--strategy accumulate=N`): the script calls `step`
after every pass and all but every N-th call do nothing. *Horovod's* (`backward_passes_per_step=N`): the script calls
`step` after N passes itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from unidist.buckets import ParameterInfo
from unidist.buffer import Buffer, DType
from unidist.errors import PeerLostError, UsageError
from unidist.exchange_options import ExchangeOptions
from unidist.gradient_rules import NormRule
from unidist.gradients import GradientExchange, ReducedGradients

if TYPE_CHECKING:
    from unidist.communicator import Communicator
    from unidist.context import Context
    from unidist.gradient_rules import GradientRules
    from unidist.loss_scaling import LossScaler
    from unidist.strategy import ShardsUpdates, Strategy

__all__ = ["Accumulation", "ParameterInfo", "Update"]

_WIDE_BYTES = 4
"""Types of so many bytes can be unscaled without loss."""


@dataclass(frozen=True)
class Accumulation:
    """How backward passes become updates.

    Args:
        passes: backward passes per update, at least 1.
        average: the update uses the mean over the passes, else their sum.
        stepwise: the script calls `step` after every pass, else once per update.
    """

    passes: int = 1
    average: bool = True
    stepwise: bool = True

    def __post_init__(self) -> None:
        if self.passes < 1:
            raise UsageError(f"{self.passes} backward passes per update: give at least 1")


class Update:
    """The framework-free half of a distributed optimizer.

    Args:
        context: the runtime.
        make_exchange: builds the exchange for a list of parameters with these options; collective.
        accumulation: how passes become updates.
        average: the gradients of the ranks are averaged, else added up.
        strategies: told of every update.
        options: what the script asks of the exchange; which ranks take part, above all.
        sharding: the strategy by which each rank updates a share of the parameters; None: all update all.
        rules: what becomes of the reduced gradients before the inner step; default: nothing.
        in_backward: complete the exchange at the end of the backward pass, so that the script sees reduced gradients
            after it; else at `step` or `synchronize`, which allows ranks to differ in how often they call backward.

    Attributes:
        copies: how many ranks along the axes of the model hold the parameter of this name; set before `add_parameters`
            where a strategy has divided the model (`PlacesParameters.copies`).
    """

    copies: Callable[[str], int] | None = None

    def __init__(
        self,
        context: Context,
        make_exchange: Callable[[Sequence[ParameterInfo], ExchangeOptions], GradientExchange],
        *,
        accumulation: Accumulation,
        average: bool = True,
        strategies: Sequence[Strategy] = (),
        options: ExchangeOptions | None = None,
        sharding: ShardsUpdates | None = None,
        rules: GradientRules | None = None,
        in_backward: bool = False,
    ) -> None:
        self.context = context
        self.accumulation = accumulation
        self.average = average
        self.strategies = strategies
        self.sharding = sharding
        self._arithmetic = rules
        self.rules = None if rules is None or rules.is_empty else rules
        """What is done to reduced gradients before every inner step; None: nothing."""
        self.overflowed = False
        """A reduced gradient was not finite, and the rules say that no rank steps: the binding leaves the step out."""
        self.in_backward = in_backward
        self.options = options or ExchangeOptions()
        self.num_ranks = self.options.num_ranks(context)
        self.step = 0
        self._make_exchange = make_exchange
        self._makes_by_plan = True
        self._exchanges: list[GradientExchange] = []
        self._place: list[tuple[GradientExchange, int]] = []
        self._passes: list[int] = []  # of each parameter, in the current window
        self._communicator: Communicator | None = None
        self._pass_index = 0  # completed passes of the current window, stepwise only
        self._dirty = False  # gradients of the current window lie in the buffers
        self.finished = False
        """The exchange of the current window is complete: the buffers hold the reduced gradients."""

    @property
    def parameters(self) -> list[ParameterInfo]:
        """The parameters whose gradients are exchanged."""
        return [exchange.parameters[index] for exchange, index in self._place]

    @property
    def communicator(self) -> Communicator:
        """Over the ranks that exchange gradients, for the binding's own use. Collective when first asked for."""
        if self.options.process_set is None:
            return self.context.axis("data")
        if self._communicator is None:
            self._communicator = self.options.communicator(self.context)
        return self._communicator

    @property
    def exchanges(self) -> Sequence[GradientExchange]:
        """One for each call of `add_parameters`; parameters are numbered on from one to the next."""
        return self._exchanges

    def add_parameters(self, parameters: Sequence[ParameterInfo]) -> None:
        """Exchange the gradients of these parameters too, numbered on from the earlier ones. Collective."""
        if not parameters and self._exchanges:
            return
        if self.copies is not None:
            parameters = [replace(each, copies=self.copies(each.name)) for each in parameters]
        exchange = self._new_exchange(parameters)
        self._exchanges.append(exchange)
        self._place += [(exchange, index) for index in range(len(parameters))]
        self._passes += [0] * len(parameters)

    @property
    def bucket_bytes(self) -> int | None:
        """Size of the buckets; None if the exchange has none whose size can be chosen."""
        return self._exchanges[0].bucket_bytes if self._exchanges else None

    def make_exchanges_by(
        self, make_exchange: Callable[[Sequence[ParameterInfo], ExchangeOptions], GradientExchange]
    ) -> None:
        """Make exchanges in this way, before there is one: for bindings in which gradients travel on their own way."""
        assert not self._exchanges, "there are exchanges already"
        self._make_exchange = make_exchange
        self._makes_by_plan = False

    def set_bucket_bytes(self, bucket_bytes: int) -> None:
        """Exchange in buckets of another size, after `finish` and before the next round. Collective.

        Every `buffer` is another one afterwards; what the old ones hold is not copied.
        """
        assert not self._dirty, "buckets are changed between two rounds"
        self.options = replace(self.options, bucket_bytes=bucket_bytes)
        old, self._exchanges, self._place = self._exchanges, [], []
        for exchange in old:
            made = self._new_exchange(exchange.parameters)
            self._exchanges.append(made)
            self._place += [(made, index) for index in range(len(made.parameters))]
            exchange.close()

    def _new_exchange(self, parameters: Sequence[ParameterInfo]) -> GradientExchange:
        exchange = self._make_exchange(parameters, self.options)
        exchange.scale = self.scale * self._folded(exchange)
        return exchange

    def _folded(self, exchange: GradientExchange) -> float:
        """Return the part of one over the loss scale that the sum is multiplied by: all or none.

        Sums of 16 bits stay scaled until they are widened: what is small would vanish.
        """
        wide = all(parameter.dtype.itemsize >= _WIDE_BYTES for parameter in exchange.parameters)
        return 1.0 / self.loss_scale if wide else 1.0

    @property
    def scaler(self) -> LossScaler | None:
        """The scaler of the loss, if it is scaled. A checkpoint keeps its `state`."""
        return None if self.rules is None else self.rules.scaler

    @property
    def loss_scale(self) -> float:
        """What the loss of the current window is multiplied by, 1 if it is not scaled."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def whole_scale(self, scale: float | None) -> float:
        """Return the factor for sums that the binding exchanges itself: `scale`, default `self.scale`, and unscaled."""
        return (self.scale if scale is None else scale) / self.loss_scale

    def buffer(self, index: int) -> Buffer:
        """Return the place for the gradient of parameter `index`."""
        exchange, local = self._place[index]
        return exchange.buffer(local)

    def moves(self, index: int) -> bool:
        """Say whether the place of parameter `index` is another one in every pass: ask `buffer` just before writing."""
        return self._place[index][0].moves

    @property
    def scale(self) -> float:
        """The factor that turns a full window's sum into what the update uses."""
        ranks = self.num_ranks if self.average else 1
        return 1.0 / (ranks * (self.accumulation.passes if self.accumulation.average else 1))

    @property
    def window_open(self) -> bool:
        """True in the middle of a stepwise window: gradients are kept, `zero_grad` must not touch them."""
        return self._pass_index > 0

    @property
    def in_round(self) -> bool:
        """True when gradients were computed that no `finish` has completed."""
        return self._dirty

    def has_gradient(self, index: int) -> bool:
        """Say whether the buffer of parameter `index` holds a gradient of the current window, to be added to."""
        return self._passes[index] > 0 and not self._place[index][0].reduces_each_pass

    def is_last_pass(self, index: int) -> bool:
        """Say whether the pass that is computing the gradient of parameter `index` is the last of its window."""
        if self.accumulation.stepwise:
            return self._pass_index == self.accumulation.passes - 1
        return self._passes[index] >= self.accumulation.passes - 1

    def lends(self, index: int) -> bool:
        """Say whether the gradient of parameter `index` may stay where it is until `finish`; see `gradient_ready`."""
        exchange, local = self._place[index]
        return not self._passes[index] and self.is_last_pass(index) and exchange.lends(local)

    def gradient_ready(self, index: int, lent: Buffer | None = None) -> None:
        """Note that the gradient of parameter `index` is in its buffer; in the last pass the exchange may start.

        Args:
            index: of the parameter.
            lent: where the gradient lies instead, for one that it `lends`; nobody changes that memory before `finish`.
        """
        last = self.is_last_pass(index)
        if self.finished and self.accumulation.passes > 1:
            raise UsageError(
                f"a second backward pass before step() reached {self.parameters[index].name!r}, but the window of "
                f"{self.accumulation.passes} passes is complete. accumulate=N counts one backward pass per step(); "
                "add the losses up before backward()."
            )
        self._passes[index] += 1
        self._begin_round()
        self.finished = False
        exchange, local = self._place[index]
        if lent is not None:
            exchange.lend(local, lent)
        elif last or exchange.reduces_each_pass:
            exchange.ready(local)
        else:
            exchange.hold(local)

    def hold(self, index: int) -> None:
        """Note a gradient in the buffer of parameter `index` that came from elsewhere than a backward pass."""
        exchange, local = self._place[index]
        self._begin_round()
        exchange.hold(local)

    def pass_without_buffer(self, index: int) -> None:
        """Note a pass whose gradient the binding exchanges itself (a sparse one)."""
        self._passes[index] += 1
        self._begin_round()

    def _begin_round(self) -> None:
        """Let the exchanges unscale by the scale of now: an update or a checkpoint may have changed it."""
        if self._dirty:
            return
        self._dirty = True
        if self.scaler is not None:
            for exchange in self._exchanges:
                exchange.scale = self.scale * self._folded(exchange)

    @property
    def completes_window(self) -> bool:
        """True when the next `step` updates the parameters."""
        return not self.accumulation.stepwise or self._pass_index >= self.accumulation.passes - 1

    def begin_step(self) -> bool:
        """Count a call of `step`; returns whether it shall update the parameters.

        Collective where `reduces_each_pass`.
        """
        if not self.accumulation.stepwise or self.accumulation.passes == 1:
            return True
        self._pass_index += 1
        if self._pass_index >= self.accumulation.passes:
            return True
        self.end_pass()
        return False

    @property
    def reduces_each_pass(self) -> bool:
        """True: passes of a window that are not its last are exchanged too."""
        return any(exchange.reduces_each_pass for exchange in self._exchanges)

    def end_pass(self) -> None:
        """Complete the exchange of a pass that is not the last of its window, where that is done. Collective."""
        for exchange in self._exchanges:
            if exchange.reduces_each_pass:
                try:
                    exchange.end_pass()
                except PeerLostError as exc:
                    self.context.report_failure(exc)
                    raise

    def finish(
        self, *, notice: int = 0, scale: float | None = None, first_parameter: int = 0
    ) -> tuple[list[bool], int]:
        """Complete the exchange. Collective over the data axis.

        Args:
            notice: 0 to 255; every rank learns the largest of all ranks.
            scale: factor for the sums; default: `self.scale`.
            first_parameter: leave out the exchanges of the parameters before this one (complete already).

        Returns:
            Per parameter from `first_parameter` on, whether any rank had a gradient; and the largest notice.
        """
        present: list[bool] = []
        largest = 0
        skipped = 0
        self._begin_round()
        for exchange in self._exchanges:
            if skipped < first_parameter:
                skipped += len(exchange.parameters)
                continue
            try:
                factor = None if scale is None else scale * self._folded(exchange)
                result = exchange.finish(scale=factor, notice=notice)
            except PeerLostError as exc:
                self.context.report_failure(exc)
                raise
            present += result.present
            largest = max(largest, result.notice)
        self._dirty = False
        self.finished = True
        if self.accumulation.passes == 1:
            self._passes = [0] * len(self._passes)  # another backward pass before the step begins a round of its own
        return present, largest

    def conclude(self, others: Sequence[ReducedGradients] = ()) -> None:
        """Apply the rules, unscale, look for overflows, clip, to what all exchanges of the window have reduced.

        The binding calls it once in a window, after the last `finish`. Collective over all ranks of the model.

        Args:
            others: gradients that the binding has reduced itself, with the factor `whole_scale`: sparse ones, each row
                once. Equal on all ranks unless they say otherwise; not deferred.
        """
        if self.rules is None:
            for exchange in self._exchanges:
                exchange.pending_factor = 1.0  # `clip_norm` may have changed it in the window before
            return
        folded = [self._folded(exchange) for exchange in self._exchanges]
        remaining = self.rules.apply(
            [*(exchange.reduced() for exchange in self._exchanges), *others],
            [*(1.0 / (self.loss_scale * factor) for factor in folded), *(1.0 for _ in others)],
        )
        self.overflowed = remaining is None
        for exchange, factor in zip(self._exchanges, remaining or folded, strict=False):
            exchange.pending_factor = factor

    def clip_norm(self, limit: float, order: float, others: Sequence[ReducedGradients] = ()) -> float:
        """Clip the gradient by its norm once, between `conclude` and the inner step. Collective like `conclude`.

        Args:
            limit: the largest norm, above 0.
            order: of the norm, above 0; `math.inf` for the largest absolute value.
            others: see `conclude`.

        Returns:
            The norm over all elements before; infinite where a gradient has overflowed, which then stays as it is.
        """
        assert self._arithmetic is not None, "made by planned_update, which gives it rules"
        if self.overflowed:
            return math.inf
        rule = NormRule(limit, order)
        remaining = self._arithmetic.apply_once(
            rule,
            [*(exchange.reduced() for exchange in self._exchanges), *others],
            [*(exchange.pending_factor for exchange in self._exchanges), *(1.0 for _ in others)],
        )
        for exchange, factor in zip(self._exchanges, remaining, strict=False):
            exchange.pending_factor = factor
        return rule.norm

    def applied(self) -> None:
        """Start the next window: the inner step is done."""
        self.reset_window()
        self.step += 1
        for strategy in self.strategies:
            strategy.on_step(self.step)
        self.context.step_applied(self.step)

    def skipped(self) -> None:
        """Start the next window: the step was left out, because a gradient has `overflowed`. No update is counted."""
        self.reset_window()

    def reset_window(self) -> None:
        """Forget the passes of the current window."""
        self._passes = [0] * len(self._passes)
        self._pass_index = 0
        self.finished = False

    def set_passes(self, passes: int) -> None:
        """Let the next updates take this many backward passes. Every rank calls it alike, between two updates.

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
        if self._dirty:
            raise UsageError(
                "the number of backward passes per step was changed between backward() and step(); change it before "
                "the first backward() of an update"
            )
        self.accumulation = Accumulation(passes, average=False, stepwise=False)
        self.reset_window()

    def take_steps(self, steps: int) -> None:
        """Let the next updates take this many passes, with a call of `step` after each, whose gradients are added up.

        Every rank calls it alike, between two updates; for an optimizer whose passes no strategy counts.
        """
        assert not self._dirty, "passes are counted anew between two updates"
        if steps != self.accumulation.passes:
            self.accumulation = Accumulation(steps, average=False)
            self.reset_window()

    def short_window_scale(self) -> float | None:
        """Return the factor for a window that ends early, or None if no rank has anything in it. Collective.

        With `average` the mean is over the passes that there were, on all ranks together.
        """
        counts = Buffer.allocate(1, DType.INT64)
        passes = counts.bytes().cast("q")
        passes[0] = max(self._pass_index, max(self._passes, default=0))
        self.communicator.allreduce(counts, counts).wait()
        if passes[0] == 0:
            return None
        if not self.accumulation.average:
            return 1.0 / (self.num_ranks if self.average else 1)
        return 1.0 / (passes[0] if self.average else passes[0] / self.num_ranks)

    renew: Callable[[Context], Update] | None = None
    """Makes this update anew in another context, where that can be done; set by `planned_update`."""

    def move_to(self, context: Context) -> None:
        """Go on in another context, without parameters; a window that was open is forgotten. Collective.

        The number of updates, the passes of a window and the loss scale stay; see `unidist.carried`.
        """
        assert self.renew is not None, "made by planned_update"
        fresh = self.renew(context)
        scaler = self.scaler
        self.close()
        self.context = context
        self.num_ranks = fresh.num_ranks
        if self._makes_by_plan:
            self._make_exchange = fresh._make_exchange
        self._arithmetic, self.rules = fresh._arithmetic, fresh.rules
        if self.rules is not None and scaler is not None:
            self.rules.scaler = scaler  # others hold on to it
        self._communicator = None
        self._place, self._passes = [], []
        self._pass_index = 0
        self._dirty = self.finished = self.overflowed = False

    def close(self) -> None:
        """Give back buffers and communicators."""
        for exchange in self._exchanges:
            exchange.close()
        self._exchanges.clear()
        if self._arithmetic is not None:
            self._arithmetic.close()
        if self._communicator is not None:
            self._communicator.close()
