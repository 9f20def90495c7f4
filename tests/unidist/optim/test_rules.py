"""Rules on reduced gradients: norms of the whole gradient wherever its parts lie, overflows, and what is left to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from unidist.buffer import Buffer
from unidist.communicator import Communicator
from unidist.errors import UsageError
from unidist.gradients.interface import ReducedGradients
from unidist.gradients.precision import LossScaling
from unidist.optim.loss_scaling import MINIMUM, LossScaler
from unidist.optim.rules import GradientRule, GradientRules, WholeGradient
from unidist.testing import RecordingCommunicator, ThreadWorld

Array = np.ndarray[Any, np.dtype[Any]]
ELEMENTS = np.random.default_rng(0).standard_normal(24)


class NumpyFramework:
    """All that the rules ask of a framework."""

    def norms(self, buffers: Sequence[Buffer], order: float) -> list[float]:
        return [float(np.linalg.norm(array(buffer), order)) for buffer in buffers]

    def clamp(self, buffer: Buffer, limit: float) -> None:
        np.clip(array(buffer), -limit, limit, out=array(buffer))

    def multiply(self, buffer: Buffer, factor: float) -> None:
        array(buffer)[:] *= factor


class Calling(GradientRule):
    """Calls a function with the gradient."""

    def __init__(self, function: Callable[[WholeGradient], Any]) -> None:
        self._function = function

    def apply(self, gradient: WholeGradient) -> None:
        self._function(gradient)


def array(buffer: Buffer) -> Array:
    return np.frombuffer(buffer.bytes(), buffer.dtype.value)


def piece(values: Array) -> Buffer:
    return Buffer.of(np.array(values))


def rules_of(*functions: Callable[[WholeGradient], Any], **options: Any) -> GradientRules:
    framework: Any = NumpyFramework()
    return GradientRules(framework, [Calling(function) for function in functions], **options)


def scaler_at(scale: float, growth_interval: int | None = 2000) -> LossScaler:
    scaler = LossScaler(LossScaling(scale, growth_interval))
    scaler.was_applied = True
    return scaler


@pytest.mark.parametrize("order", [0.5, 1, 2, 3, math.inf])
def test_the_norm_counts_each_element_once_however_gradients_are_divided(order: float) -> None:
    # Two ranks of the model hold 12 elements each, and 4 more that both hold; each divides its own over two data ranks.
    shared = np.arange(4.0)
    expected = np.linalg.norm(np.concatenate([ELEMENTS, shared]), order)

    def main(world: Communicator) -> float:
        stage, data = divmod(world.rank, 2)
        data_axis = world.split((2 * stage, 2 * stage + 1))
        model_axis = world.split((data, data + 2))
        assert data_axis is not None
        assert model_axis is not None
        own = ELEMENTS[12 * stage : 12 * stage + 8][4 * data : 4 * data + 4]
        parts = [
            ReducedGradients((piece(own), piece(shared[2 * data : 2 * data + 2])), data_axis, copies=(1, 2)),
            ReducedGradients((piece(ELEMENTS[12 * stage + 8 : 12 * stage + 12]), piece(np.zeros(0)))),
        ]
        found: list[float] = []
        rules_of(lambda gradient: found.append(gradient.norm(order)), model_axes=[model_axis]).apply(parts, [1.0, 1.0])
        return found[0]

    with ThreadWorld(4) as world:
        assert world.run(main) == pytest.approx([expected] * 4, rel=1e-14)


def test_the_norm_is_one_number_exchanged_however_many_parts_there_are() -> None:
    def main(world: Communicator) -> int:
        records: list[Any] = []
        recording = RecordingCommunicator(world, records)
        parts = [ReducedGradients((piece(ELEMENTS[:3]),), recording)] * 3
        rules_of(lambda gradient: gradient.norm(2)).apply(parts, [1.0] * 3)
        return len(records)

    with ThreadWorld(2) as world:
        assert world.run(main) == [1, 1]


def test_factors_are_part_of_the_norm_and_applied_in_one_go_or_left_to_the_inner_step() -> None:
    in_place, deferred = piece(ELEMENTS[:12]), piece(ELEMENTS[12:])
    parts = [ReducedGradients((in_place,)), ReducedGradients((deferred,), deferred=True)]
    norms: list[float] = []

    def halve(gradient: WholeGradient) -> None:
        norms.append(gradient.norm(2))
        gradient.multiply(0.5)
        norms.append(gradient.norm(2))

    remaining = rules_of(halve).apply(parts, [1.0, 0.25])
    expected = np.linalg.norm(np.concatenate([ELEMENTS[:12], ELEMENTS[12:] / 4]))
    assert norms == pytest.approx([expected, expected / 2], rel=1e-14)
    assert remaining == [1.0, 0.125]
    np.testing.assert_array_equal(array(in_place), ELEMENTS[:12] / 2)
    np.testing.assert_array_equal(array(deferred), ELEMENTS[12:])


def test_clamping_is_of_the_unscaled_gradient_and_norms_after_it_are_new() -> None:
    memory = piece(ELEMENTS * 8)
    norms: list[float] = []

    def clamp(gradient: WholeGradient) -> None:
        norms.append(gradient.norm(math.inf))
        gradient.clamp(0.5)
        norms.append(gradient.norm(math.inf))

    assert rules_of(clamp).apply([ReducedGradients((memory,))], [1 / 8]) == [1.0]
    assert norms == [np.max(np.abs(ELEMENTS)), 0.5]
    np.testing.assert_allclose(array(memory), np.clip(ELEMENTS, -0.5, 0.5), rtol=1e-15)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_one_overflow_anywhere_leaves_the_update_out_on_all_ranks(value: float, where: int) -> None:
    def main(world: Communicator) -> tuple[object, float, list[int]]:
        values = ELEMENTS.copy()
        if world.rank == where:
            values[5] = value
        scaler = scaler_at(1024.0)
        called: list[int] = []
        rules = rules_of(lambda gradient: called.append(1), scaler=scaler, everyone=world)
        return rules.apply([ReducedGradients((piece(values),), world)], [1.0]), scaler.scale, called

    with ThreadWorld(3) as world:
        assert world.run(main) == [(None, 512.0, [])] * 3


def test_a_rule_can_leave_the_update_out_and_later_rules_do_not_see_it() -> None:
    seen: list[str] = []
    rules = rules_of(lambda gradient: gradient.skip(), lambda gradient: seen.append("later"))
    assert rules.apply([ReducedGradients((piece(np.ones(3)),))], [1.0]) is None
    assert seen == []


def test_without_a_scaler_nobody_looks_for_overflows() -> None:
    memory = piece(np.array([math.inf, 1.0]))
    assert rules_of(lambda gradient: gradient.multiply(0.5)).apply([ReducedGradients((memory,))], [1.0]) == [1.0]
    np.testing.assert_array_equal(array(memory), [math.inf, 0.5])


def test_a_loss_that_nobody_scaled_is_an_error_on_every_rank() -> None:
    def main(world: Communicator) -> str:
        rules = rules_of(scaler=LossScaler(LossScaling()), everyone=world)
        with pytest.raises(UsageError, match="no loss was multiplied") as raised:
            rules.apply([ReducedGradients((piece(ELEMENTS),))], [1.0])
        return str(raised.value)

    with ThreadWorld(2) as world:
        assert len(set(world.run(main))) == 1


def updates(scaler: LossScaler, overflows: Sequence[bool]) -> list[float]:
    scales = []
    for overflowed in overflows:
        scaler.update(overflowed=overflowed)
        scales.append(scaler.scale)
    return scales


def test_the_scale_halves_at_an_overflow_and_doubles_after_an_interval_without() -> None:
    scaler = scaler_at(8.0, growth_interval=2)
    assert updates(scaler, [False, False, False, True, False, False, False]) == [8, 16, 16, 8, 8, 16, 16]
    assert scaler.num_skipped == 1


def test_a_fixed_scale_stays() -> None:
    assert updates(scaler_at(8.0, growth_interval=None), [False, True, False]) == [8, 8, 8]


def test_a_training_that_has_diverged_ends_with_an_error() -> None:
    scaler = scaler_at(MINIMUM * 2)
    scaler.update(overflowed=True)
    with pytest.raises(UsageError, match="diverged"):
        scaler.update(overflowed=True)


def test_a_scaler_goes_on_from_its_state() -> None:
    first = scaler_at(8.0, growth_interval=3)
    updates(first, [False, True, False, False])
    second = scaler_at(1.0, growth_interval=3)
    second.load_state(first.state())
    assert updates(second, [False, True]) == updates(first, [False, True]) == [8, 4]
    assert second.num_skipped == 2
