"""Updates: which backward passes make one, and what is applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fake_exchange import FakeExchange

from unidist.buffer import Buffer, DType
from unidist.engines.single import SingleCommunicator
from unidist.errors import PeerLostError, UsageError
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.interface import ReducedGradients
from unidist.gradients.options import ExchangeOptions
from unidist.gradients.precision import LossScaling
from unidist.mesh import REPLICA_AXES, SHARD_REPLICA_AXES
from unidist.optim.accumulation import Accumulation
from unidist.optim.loss_scaling import LossScaler
from unidist.optim.rules import GradientRules
from unidist.optim.update import Update, UpdateParts
from unidist.timeline import Recorder


class FakeContext:
    """Four ranks that all do the same."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.steps: list[int] = []
        self.failures: list[BaseException] = []

    is_elastic = False

    def axis_size(self, name: str) -> int:
        return 4

    def owned(self, kind: Any) -> Any:
        return kind(self)

    def axis(self, name: str) -> Any:
        class FourAlike(SingleCommunicator):
            def allreduce(self, source: Buffer, target: Buffer, **options: Any) -> Any:
                values = target.bytes().cast("q")
                values[0] *= 4
                return super().allreduce(target, target, **options)

        return FourAlike()

    def step_applied(self, step: int) -> None:
        self.steps.append(step)

    def report_failure(self, error: BaseException) -> None:
        self.failures.append(error)


PARAMETERS = [ParameterInfo("a", (2,), DType.FLOAT32), ParameterInfo("b", (3,), DType.FLOAT32)]


def make(accumulation: Accumulation | None = None, **options: Any) -> tuple[Update, list[FakeExchange], FakeContext]:
    exchanges: list[FakeExchange] = []
    context: Any = FakeContext()

    def make_exchange(parameters: Sequence[ParameterInfo], options: ExchangeOptions) -> FakeExchange:
        exchanges.append(FakeExchange(parameters))
        return exchanges[-1]

    rules = options.pop("rules", None)

    def make_parts(context: Any) -> UpdateParts:
        return UpdateParts(context, make_exchange, rules)

    update = Update(context, make_parts, accumulation=accumulation or Accumulation(), **options)
    update.add_parameters(PARAMETERS)
    return update, exchanges, context


@pytest.mark.parametrize(
    ("accumulation", "average", "scale"),
    [
        (Accumulation(), True, 1 / 4),
        (Accumulation(), False, 1.0),
        (Accumulation(3), True, 1 / 12),
        (Accumulation(3, average=False), True, 1 / 4),
        (Accumulation(3), False, 1 / 3),
        (Accumulation(3, average=False), False, 1.0),
    ],
)
def test_the_scale_makes_the_mean_that_was_asked_for(accumulation: Accumulation, average: bool, scale: float) -> None:
    update, (exchange,), _ = make(accumulation, average=average)
    assert update.scale == pytest.approx(scale)
    assert exchange.scale == update.scale


def test_a_plain_pass_is_exchanged_as_it_comes_and_applied() -> None:
    update, (exchange,), context = make()
    assert not update.window.in_round
    for index in (1, 0):
        update.gradient_ready(index)
    assert update.window.in_round
    assert update.begin_step()
    assert update.finish() == ([True, True], bytes(3))
    update.applied()
    assert exchange.calls == [("ready", 1), ("ready", 0), ("finish", None, 0)]
    assert (context.steps, update.step, update.window.in_round) == ([1], 1, False)


def test_a_stepwise_window_is_held_until_its_last_pass() -> None:
    update, (exchange,), context = make(Accumulation(3))
    for expected in (False, False, True):
        update.gradient_ready(0)
        assert update.begin_step() is expected
        assert update.window.is_open
    assert exchange.calls == [("accumulate", 0), ("accumulate", 0), ("ready", 0)]
    update.finish()
    update.applied()
    assert not update.window.is_open
    assert context.steps == [1]
    update.gradient_ready(0)
    assert exchange.calls[-1] == ("accumulate", 0)


def test_horovods_window_counts_passes_of_each_parameter_and_one_step() -> None:
    update, (exchange,), _ = make(Accumulation(2, average=False, stepwise=False))
    update.gradient_ready(0)
    assert update.has_gradient(0)
    assert not update.has_gradient(1)
    update.gradient_ready(0)
    assert update.begin_step()
    assert exchange.calls == [("accumulate", 0), ("ready", 0)]


def test_one_backward_pass_too_many_in_a_finished_window_is_refused() -> None:
    update, _, _ = make(Accumulation(2))
    for _ in range(2):
        update.gradient_ready(0)
        update.begin_step()
    update.finish()
    with pytest.raises(UsageError, match="window of 2 passes is complete"):
        update.gradient_ready(0)


def test_parameters_added_later_are_numbered_on_and_have_an_exchange_of_their_own() -> None:
    update, exchanges, _ = make()
    update.add_parameters([ParameterInfo("c", (1,), DType.FLOAT64)])
    update.gradient_ready(2)
    assert exchanges[1].calls == [("ready", 0)]
    assert update.buffer(2) is exchanges[1].buffer(0)
    assert [item.name for item in update.parameters] == ["a", "b", "c"]
    assert update.finish(first_parameter=2) == ([True], bytes(3))
    assert exchanges[0].calls == []


def test_the_largest_notice_of_all_exchanges_is_returned() -> None:
    update, _, _ = make()
    update.add_parameters([ParameterInfo("c", (1,), DType.FLOAT64)])
    assert update.finish(flags=bytes((3, 1, 0)))[1] == bytes((3, 1, 0))


def test_a_lost_peer_is_reported_and_raised() -> None:
    update, (exchange,), context = make()
    exchange.error = PeerLostError("rank 2 died", ranks=(2,))
    with pytest.raises(PeerLostError, match="rank 2 died"):
        update.finish()
    assert context.failures == [exchange.error]


def test_a_short_window_is_averaged_over_the_passes_there_were() -> None:
    for average, over_passes, expected in (
        (True, True, 1 / 8),
        (True, False, 1 / 4),
        (False, True, 1 / 2),
        (False, False, 1.0),
    ):
        update, _, _ = make(Accumulation(4, average=over_passes), average=average)
        for _ in range(2):
            update.gradient_ready(0)
            update.begin_step()
        assert update.short_window_scale() == pytest.approx(expected)


def test_an_empty_window_has_nothing_to_apply() -> None:
    update, _, _ = make(Accumulation(4))
    assert update.short_window_scale() is None


def test_strategies_hear_of_every_update() -> None:
    class Listener:
        heard: list[int]

        def on_step(self, step: int) -> None:
            self.heard.append(step)

    listener: Any = Listener()
    listener.heard = []
    update, _, _ = make(strategies=[listener])
    for _ in range(3):
        update.applied()
    assert listener.heard == [1, 2, 3]


def test_the_number_of_passes_may_change_between_updates() -> None:
    update, (exchange,), _ = make()
    update.set_passes(2)
    for _ in range(2):
        update.gradient_ready(0)
    assert exchange.calls == [("accumulate", 0), ("ready", 0)]
    with pytest.raises(UsageError, match=r"between backward\(\) and step\(\)"):
        update.set_passes(1)
    update.finish()
    update.applied()
    update.set_passes(1)
    update.gradient_ready(0)
    assert exchange.calls[-1] == ("ready", 0)


def test_passes_that_a_strategy_counts_are_left_to_it() -> None:
    update, _, _ = make(Accumulation(3))
    with pytest.raises(UsageError, match="accumulate=3"):
        update.set_passes(2)
    with pytest.raises(UsageError, match="at least 1"):
        make()[0].set_passes(0)


def test_close_closes_every_exchange_once() -> None:
    update, (exchange,), _ = make()
    update.close()
    update.close()
    assert exchange.calls == ["close"]


class FiniteFramework:
    """Finds every gradient finite."""

    def norms(self, buffers: Sequence[Buffer], order: float) -> list[float]:
        return [1.0] * len(buffers)


def scaling(growth_interval: int) -> tuple[GradientRules, LossScaler]:
    framework: Any = FiniteFramework()
    scaler = LossScaler(LossScaling(8.0, growth_interval))
    scaler.was_applied = True
    return GradientRules(framework, [], scaler=scaler), scaler


def test_sums_are_unscaled_by_the_scale_of_their_own_round() -> None:
    rules, scaler = scaling(growth_interval=1)
    update, (exchange,), _ = make(rules=rules)
    assert exchange.scale == update.scale / 8
    update.gradient_ready(0)
    update.finish()
    update.conclude()
    assert not update.overflowed
    assert scaler.scale == 16.0
    update.gradient_ready(0)
    assert exchange.scale == update.scale / 16
    update.finish()
    scaler.load_state({"scale": 32.0, "good_updates": 0, "num_skipped": 0})  # from a checkpoint
    update.finish(scale=0.5)
    assert exchange.calls[-1] == ("finish", 0.5 / 32, 0)
    assert exchange.scale == update.scale / 32
    assert update.whole_scale(None) == update.scale / 32


def test_sums_of_16_bits_stay_scaled_until_they_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    def deferred(exchange: FakeExchange) -> ReducedGradients:
        return ReducedGradients((exchange.buffer(0),), deferred=True)

    monkeypatch.setattr(FakeExchange, "reduced", deferred)
    monkeypatch.setitem(globals(), "PARAMETERS", [ParameterInfo("narrow", (2,), DType.FLOAT16)])
    update, (exchange,), _ = make(rules=scaling(growth_interval=1)[0])
    update.gradient_ready(0)
    update.finish()
    update.conclude()
    assert exchange.scale == update.scale
    assert exchange.pending_factor == 1 / 8


class HeldByFewer:
    """Places of a model of which two ranks each hold the parameters "expert.*"."""

    def copies(self, path: str) -> int:
        return 1 if path.startswith("expert") else 2

    def gradient_axis(self, path: str) -> str:
        return SHARD_REPLICA_AXES if path.startswith("expert") else REPLICA_AXES

    def cut_axis(self, path: str) -> str | None:
        return None


class SizedContext(FakeContext):
    """Four ranks, in two groups that hold other experts."""

    def axis_size(self, name: str) -> int:
        return 2 if name == SHARD_REPLICA_AXES else 4


def make_divided(names: Sequence[str]) -> tuple[Update, list[tuple[str, list[ParameterInfo]]]]:
    made: list[tuple[str, list[ParameterInfo]]] = []

    def make_exchange(parameters: Sequence[ParameterInfo], options: ExchangeOptions) -> FakeExchange:
        made.append((options.gradient_axis, list(parameters)))
        return FakeExchange(parameters)

    context: Any = SizedContext()
    update = Update(
        context,
        lambda context: UpdateParts(context, make_exchange),
        accumulation=Accumulation(),
        places=HeldByFewer(),
    )
    update.add_parameters([ParameterInfo(name, (2,), DType.FLOAT32) for name in names])
    return update, made


def test_parameters_that_fewer_ranks_hold_have_an_exchange_with_those() -> None:
    update, made = make_divided(["a", "b", "expert.a", "expert.b"])
    assert [(axis, [each.name for each in group]) for axis, group in made] == [
        (REPLICA_AXES, ["a", "b"]),
        (SHARD_REPLICA_AXES, ["expert.a", "expert.b"]),
    ]
    assert [each.copies for each in update.parameters] == [2, 2, 1, 1]
    assert {exchange.scale for exchange in update.exchanges} == {1 / 4}  # a mean over all, whoever holds it
    assert [update.repeat_factor(index) for index in range(4)] == [1.0, 1.0, 2.0, 2.0]
    assert not update.repeats_unchanged


def test_the_first_exchange_is_with_all_so_that_a_notice_reaches_them() -> None:
    _, made = make_divided(["expert.a"])
    assert [(axis, len(group)) for axis, group in made] == [(REPLICA_AXES, 0), (SHARD_REPLICA_AXES, 1)]


def test_parameters_in_any_order_are_exchanged_and_can_be_put_in_groups() -> None:
    names = ["a", "expert.a", "b", "expert.b"]
    update, made = make_divided(names)
    assert [len(group) for _, group in made] == [1, 1, 1, 1]
    assert [names[number] for number in update.in_groups(names)] == ["a", "b", "expert.a", "expert.b"]
    with pytest.raises(UsageError, match=r"expert\.a.*sparse=False"):
        update.check_dense("expert.a")
    update.check_dense("a")


def _pass(update: Update, total: float) -> float:
    """Make a pass whose loss is weighted; returns the number by which it is divided."""
    divisor = update.weigh(total)
    update.gradient_ready(0)
    return divisor


def test_one_weighted_pass_is_divided_by_its_weights() -> None:
    update, (exchange,), _ = make()
    assert _pass(update, 6.0) == 6
    assert exchange.scale == 1 / 4


@pytest.mark.parametrize("accumulation", [Accumulation(3), Accumulation(3, average=False, stepwise=False)])
@pytest.mark.parametrize(("average", "num_ranks"), [(True, 4), (False, 1)])
def test_weighted_passes_are_divided_by_all_their_weights(
    accumulation: Accumulation, average: bool, num_ranks: int
) -> None:
    update, (exchange,), _ = make(accumulation, average=average)
    for _ in range(2):  # one window leaves nothing to the next one
        assert [(_pass(update, total), update.begin_step())[0] for total in (6.0, 0.0, 18.0)] == [6, 6, 6]
        assert exchange.scale == pytest.approx(6 / 24 / num_ranks)
        update.finish()
        assert update.whole_scale(None) == exchange.scale  # of sparse gradients, and of parameters that are thawed
        update.applied()
    assert exchange.scale == update.scale
    assert update.scale * num_ranks == pytest.approx(1 / 3 if accumulation.average else 1)


def test_a_window_that_begins_with_nothing_is_divided_by_what_comes() -> None:
    update, (exchange,), _ = make(Accumulation(3))
    assert [(_pass(update, total), update.begin_step())[0] for total in (0.0, 5.0, 5.0)] == [1, 5, 5]
    assert exchange.scale == 1 / 8


def test_a_short_window_of_weighted_passes_is_divided_by_their_weights() -> None:
    update, _, _ = make(Accumulation(4))
    for total in (2.0, 6.0):
        _pass(update, total)
        update.begin_step()
    assert update.short_window_scale() == pytest.approx(2 / 8 / 4)


def test_passes_that_are_exchanged_one_by_one_add_up_to_a_mean() -> None:
    update, (exchange,), _ = make()
    _pass(update, 2.0)
    update.finish()
    for total, divisor, part in ((6.0, 2, 2 / 8), (8.0, 8, 8 / 16)):
        assert _pass(update, total) == divisor  # what is there has been divided by all weights before
        assert exchange.scale == part / 4
        assert update.repeat_factor(0) == 1
        update.finish()
    update.applied()
    assert exchange.scale == 1 / 4


def test_the_losses_of_one_pass_have_weights_of_their_own() -> None:
    update, (exchange,), _ = make()
    assert [update.weigh(total) for total in (2.0, 6.0, 6.0, 3.0)] == [2, 6, 6, 3]
    update.gradient_ready(0)
    assert exchange.scale == 1 / 4
    with pytest.raises(UsageError, match="a window of several backward passes has a pass"):
        update.weigh(2.0)


def test_the_losses_of_one_of_several_passes_have_one_weight() -> None:
    update, _, _ = make(Accumulation(2))
    assert [update.weigh(total) for total in (2.0, 2.0)] == [2, 2]
    update.gradient_ready(0)
    update.begin_step()
    assert [update.weigh(total) for total in (3.0, 3.0)] == [2, 2]
    with pytest.raises(UsageError, match="Weight one loss in each pass"):
        update.weigh(4.0)
