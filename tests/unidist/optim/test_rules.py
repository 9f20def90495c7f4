"""Rules on reduced gradients: norms of the whole gradient wherever its parts lie, overflows, and what is left to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator
from unidist.errors import UsageError
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.interface import ReducedGradients
from unidist.gradients.pieces import GradientPiece
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


def held(
    *pieces: tuple[int, int, Array],
    parameters: Sequence[ParameterInfo],
    over: Communicator | None = None,
    deferred: bool = False,
) -> ReducedGradients:
    """Return reduced gradients that are these pieces: number of the parameter, start, elements."""
    memory = [piece(elements) for _, _, elements in pieces]
    found = [
        GradientPiece(number, parameters[number], start, each)
        for (number, start, _), each in zip(pieces, memory, strict=True)
    ]
    return ReducedGradients(tuple(memory), over, (), deferred, tuple(parameters), lambda: found)


def info(name: str, count: int, copies: int = 1, cut_axis: str | None = None) -> ParameterInfo:
    return ParameterInfo(name, (count,), DType.FLOAT64, copies=copies, cut_axis=cut_axis)


def squares(gradient: WholeGradient) -> dict[str, float]:
    """Return the square of each parameter's norm, as far as this rank has pieces of it."""
    pieces = gradient.pieces()
    sums = gradient.sums([float(np.sum(each.array() ** 2)) for each in pieces])
    return {each.parameter.name: total for each, total in zip(pieces, sums, strict=True)}


def test_sums_are_over_all_pieces_of_a_parameter_and_a_rank_may_have_none() -> None:
    parameters = [info("a", 5), info("b", 1), info("missing", 3)]
    values = np.arange(1.0, 7.0)

    def main(world: Communicator) -> dict[str, float]:
        own = [
            [(0, 0, values[:3])],
            [(0, 3, values[3:5]), (1, 0, values[5:])],
            [],
        ][world.rank]
        found: list[dict[str, float]] = []
        rules = rules_of(lambda gradient: found.append(squares(gradient)))
        rules.apply([held(*own, parameters=parameters, over=world)], [1.0])
        return found[0]

    with ThreadWorld(3) as world:
        assert world.run(main) == [{"a": 55.0}, {"a": 55.0, "b": 36.0}, {}]


def test_sums_follow_parameters_that_are_cut_tied_or_of_one_stage_alone() -> None:
    # Two stages of two ranks that cut "cut.N"; "tied" is on both stages, and whole everywhere.
    def main(world: Communicator) -> list[dict[str, float]]:
        stage, half = divmod(world.rank, 2)
        tensor, pipeline = world.split((2 * stage, 2 * stage + 1)), world.split((half, half + 2))
        assert tensor is not None
        assert pipeline is not None
        names = [info(f"cut.{stage}", 2, cut_axis="tensor"), info("tied", 1, copies=4), *[info("last", 1, 2)][:stage]]
        values = [np.full(2, world.rank + 1.0), np.array([7.0]), *[np.array([5.0])][:stage]]
        found: list[dict[str, float]] = []
        rules = rules_of(lambda gradient: found.append(squares(gradient)), model_axes=[tensor, pipeline])
        for _ in range(2):  # names are gathered once
            rules.apply([held(*((i, 0, each) for i, each in enumerate(values)), parameters=names)], [1.0])
        return found

    first, second = {"cut.0": 10.0, "tied": 49.0}, {"cut.1": 50.0, "tied": 49.0, "last": 25.0}
    with ThreadWorld(4) as world:
        assert world.run(main) == [[first] * 2] * 2 + [[second] * 2] * 2


def test_pieces_are_unscaled_and_norms_after_them_are_new() -> None:
    part = held((0, 0, ELEMENTS), parameters=[info("a", 24)], deferred=True)
    norms: list[float] = []

    def change(gradient: WholeGradient) -> None:
        norms.append(gradient.norm(2))
        (only,) = gradient.pieces()
        assert gradient.step == 7
        np.testing.assert_array_equal(only.array(), ELEMENTS / 4)
        for factor in (2.0, 3.0):
            only.array()[:] *= factor
            norms.append(gradient.norm(2))

    assert rules_of(change).apply([part], [0.25], step=7) == [1.0]
    np.testing.assert_allclose(array(part.memory[0]), ELEMENTS * 1.5, rtol=1e-15)
    length = float(np.linalg.norm(ELEMENTS))
    assert norms == pytest.approx([length / 4, length / 2, length * 1.5], rel=1e-14)


def test_pieces_of_scaled_float16_or_of_sparse_gradients_are_refused() -> None:
    narrow = Buffer.of(np.ones(2, np.float16))
    scaled = ReducedGradients((narrow,), deferred=True, pieces=list)
    for part, text in ((scaled, "float16"), (ReducedGradients((piece(ELEMENTS),)), "sparse=False")):
        with pytest.raises(UsageError, match=text):
            rules_of(lambda gradient: gradient.pieces()).apply([part], [0.5])


def test_parameters_are_cut_like_the_pieces() -> None:
    parameters = [info("a", 2), info("b", 4)]
    parts = [
        held((0, 0, np.ones(2)), parameters=parameters[:1]),
        held((0, 1, np.ones(2)), parameters=parameters[1:]),
    ]
    found: list[list[float]] = []
    rules = rules_of(lambda gradient: found.extend(array(each).tolist() for each in gradient.parameters()))
    rules.apply(parts, [1.0, 1.0], values=lambda: [piece(np.arange(2.0)), piece(np.arange(10.0, 14.0))])
    assert found == [[0.0, 1.0], [11.0, 12.0]]
