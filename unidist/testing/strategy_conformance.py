"""The conformance suite of strategies: training over ranks gives the numbers of one process, or what else is promised.

    from unidist.testing import StrategyConformance

    class TestMyStrategy(StrategyConformance):
        strategy = "mine=2"

A strategy that differs from one process by design (lossy compression, local SGD) sets `exact = False`. It is held to
what it does promise: the ranks are equal, it finds the minimum of a quadratic function, and updates are counted.

Runs in real processes; the conftest needs `pytest_plugins = ["unidist.testing.fixtures"]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import ClassVar

import numpy as np
import pytest

from unidist.testing._training import (
    Quadratic,
    RankOutcome,
    Training,
    descend_on_rank,
    largest_error,
    train_alone,
    train_on_rank,
)
from unidist.testing.cases._arrays import Array
from unidist.testing.fixtures import RankPoolFactory


class StrategyConformance:
    """See the module's text. Each attribute may be replaced in a subclass.

    Attributes:
        strategy: the strategy line.
        engine: engine that it runs on.
        framework: "torch", "tensorflow", or another whose adapter has its half of the suite.
        modes: of the ways in which the framework runs a step ("eager", "function", "fit" of TensorFlow); "" is the
            usual one.
        sizes: numbers of ranks; they divide 12.
        optimizers: of "sgd" (with momentum) and "adamw".
        passes: calls of `step` that make one update.
        loss_factor: what the loss of the single process is multiplied by (a strategy that sums over passes).
        tolerance: largest relative difference of float64 parameters from those of one process.
        narrow_tolerance: the same for float32 parameters.
        exact: it gives the numbers of one process; see the module's text.
        reference: strategy line of that one process, for strategies that change gradients by design (noise, clipping);
            "": it trains without unidist.
        equal_every: after each so many updates the ranks hold the same parameters.
        quadratic_error: largest relative distance from the minimum after `quadratic_steps`.
        quadratic_steps: updates by gradient descent; a multiple of `equal_every`.
        common_optimum: it finds the minimum where that of every rank's own share is the same, and else perhaps not.
        case_timeout: longest time for one training.
        shares_results: whichever test of the class runs first does the work of others, too. A tool that measures tests
            divides the time of the class by their number.
    """

    strategy: ClassVar[str] = ""
    engine: ClassVar[str] = "shm"
    framework: ClassVar[str] = "torch"
    modes: ClassVar[Sequence[str]] = ("",)
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4)
    optimizers: ClassVar[Sequence[str]] = ("sgd", "adamw")
    passes: ClassVar[int] = 1
    loss_factor: ClassVar[float] = 1.0
    tolerance: ClassVar[float] = 1e-12
    narrow_tolerance: ClassVar[float] = 1e-5
    exact: ClassVar[bool] = True
    reference: ClassVar[str] = ""
    equal_every: ClassVar[int] = 1
    quadratic_error: ClassVar[float] = 0.01
    quadratic_steps: ClassVar[int] = 200
    common_optimum: ClassVar[bool] = False
    case_timeout: ClassVar[timedelta] = timedelta(seconds=180)
    shares_results: ClassVar[bool] = True

    _trained: ClassVar[dict[tuple[int, Training], list[RankOutcome]]] = {}
    _alone: ClassVar[dict[Training, dict[str, Array]]] = {}
    _descended: ClassVar[dict[tuple[int, Quadratic], list[RankOutcome]]] = {}

    def __init_subclass__(cls) -> None:
        # What was trained serves several tests: most of their time is the training.
        cls._trained, cls._alone, cls._descended = {}, {}, {}

    @pytest.fixture(autouse=True)
    def _use_pool(self, rank_pool: RankPoolFactory) -> None:
        self._rank_pool = rank_pool

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each test the sizes, optimizers and modes of this class."""
        if "size" in metafunc.fixturenames:
            metafunc.parametrize("size", self.sizes, scope="class")  # so that few ranks are alive at a time
        if "group_size" in metafunc.fixturenames:
            metafunc.parametrize("group_size", [size for size in self.sizes if size > 1], scope="class")
        if "optimizer" in metafunc.fixturenames:
            metafunc.parametrize("optimizer", self.optimizers)
        if "mode" in metafunc.fixturenames:
            metafunc.parametrize("mode", self.modes)

    def training(self, optimizer: str, mode: str) -> Training:
        """Return the training: ten updates, or a few more so that the ranks are equal at the end."""
        updates = -(-10 // self.equal_every) * self.equal_every
        return Training(optimizer, steps=updates * self.passes, passes=self.passes, mode=mode)

    def train(self, size: int, training: Training) -> list[RankOutcome]:
        """Train over `size` ranks with this strategy."""
        return self._rank_pool(size).run(
            train_on_rank, (self.framework, self.strategy, self.engine, training), timeout=self.case_timeout
        )

    def trained(self, size: int, training: Training) -> list[RankOutcome]:
        """Return what `train` gave, the first time."""
        if (size, training) not in self._trained:
            self._trained[size, training] = self.train(size, training)
        return self._trained[size, training]

    def descend(self, size: int) -> list[RankOutcome]:
        """Minimize a quadratic function over `size` ranks with this strategy; what it came to serves several tests."""
        quadratic = self._quadratic()
        if (size, quadratic) not in self._descended:
            self._descended[size, quadratic] = self._rank_pool(size).run(
                descend_on_rank, (self.framework, self.strategy, self.engine, quadratic), timeout=self.case_timeout
            )
        return self._descended[size, quadratic]

    def _quadratic(self) -> Quadratic:
        return Quadratic(self.quadratic_steps, self.passes, self.common_optimum)

    def train_one_process(self, training: Training) -> dict[str, Array]:
        """Return what training in one process gives, on the concatenated batches; see `reference`."""
        whole = replace(training.concatenated(), loss_factor=self.loss_factor)
        if whole not in self._alone:
            self._alone[whole] = self._train_single(whole, 1)
        return self._alone[whole]

    def _train_single(self, training: Training, num_shares: int) -> dict[str, Array]:
        """Train in one process on the first of so many shares, and nothing is exchanged."""
        pool = self._rank_pool(1)
        if self.reference:
            call, options = (self.framework, self.reference, self.engine, training), {"num_shares": num_shares}
            outcome: RankOutcome = pool.run(train_on_rank, call, options, timeout=self.case_timeout)[0]
            return outcome.parameters
        parameters: dict[str, Array] = pool.run(train_alone, (self.framework, training, 0, num_shares))[0]
        return parameters

    def test_training_gives_the_numbers_of_one_process(self, size: int, optimizer: str, mode: str) -> None:
        self._need_exactness()
        training = self.training(optimizer, mode)
        expected = self.train_one_process(training)
        for rank, outcome in enumerate(self.trained(size, training)):
            assert outcome.parameters.keys() == expected.keys()
            for name, value in expected.items():
                limit = self.narrow_tolerance if value.dtype == np.float32 else self.tolerance
                error = largest_error(outcome.parameters[name], value)
                assert error <= limit, (
                    f"{name} on rank {rank} differs by {error:.2e} from one process, more than {limit:.0e}"
                )

    def test_the_comparison_fails_without_the_exchange(self, group_size: int, optimizer: str, mode: str) -> None:
        self._need_exactness()
        training = self.training(optimizer, mode)
        expected = self.train_one_process(training)
        alone = self._train_single(training, group_size)
        for name in ("inner", "head", "bias", "narrow"):
            limit = self.narrow_tolerance if expected[name].dtype == np.float32 else self.tolerance
            error = largest_error(alone[name], expected[name])
            assert error > 100 * limit, f"{name} differs by {error:.2e} only: a missing exchange would not be seen"

    def test_parameters_are_the_same_bits_on_every_rank(self, group_size: int, optimizer: str, mode: str) -> None:
        first, *others = self.trained(group_size, self.training(optimizer, mode))
        for rank, outcome in enumerate(others, start=1):
            for name, value in first.parameters.items():
                assert value.tobytes() == outcome.parameters[name].tobytes(), (
                    f"{name} differs between ranks 0 and {rank}"
                )

    def test_updates_are_counted_on_every_rank(self, size: int, optimizer: str, mode: str) -> None:
        training = self.training(optimizer, mode)
        wanted = tuple(range(1, training.steps // self.passes + 1))
        for rank, outcome in enumerate(self.trained(size, training)):
            assert outcome.steps == wanted, (
                f"{training.steps} calls of step are {len(wanted)} updates; rank {rank} was told of {outcome.steps}"
            )

    def test_it_finds_the_minimum_of_a_quadratic_function(self, group_size: int) -> None:
        if self.exact:
            pytest.skip("it gives the numbers of one process, which says more")
        for rank, outcome in enumerate(self.descend(group_size)):
            error = self._quadratic().error(outcome.parameters["weights"], group_size)
            assert error <= self.quadratic_error, (
                f"after {self.quadratic_steps} updates rank {rank} is {error:.2e} from the minimum, more than "
                f"{self.quadratic_error:g}"
            )

    def test_many_updates_leave_the_ranks_equal(self, group_size: int) -> None:
        if self.exact:
            pytest.skip("it gives the numbers of one process, which says more")
        first, *others = self.descend(group_size)
        for rank, outcome in enumerate(others, start=1):
            assert outcome.parameters["weights"].tobytes() == first.parameters["weights"].tobytes(), (
                f"after {self.quadratic_steps} updates ranks 0 and {rank} have drifted apart"
            )

    def _need_exactness(self) -> None:
        if not self.exact:
            pytest.skip("it differs from one process by design; what it promises is tested instead")

    def test_a_second_round_of_init_and_shutdown_gives_the_same(self, group_size: int, mode: str) -> None:
        training = self.training(self.optimizers[0], mode)
        first, second = self.trained(group_size, training)[0], self.train(group_size, training)[0]
        for name, value in first.parameters.items():
            assert value.tobytes() == second.parameters[name].tobytes(), f"{name} differs between two runs"

    def test_what_is_frozen_or_unused_stays(self, group_size: int, mode: str) -> None:
        if "adamw" not in self.optimizers:
            pytest.skip("an optimizer with weight decay shows whether an unused parameter is touched")
        training = self.training("adamw", mode)
        before = self._rank_pool(1).run(train_alone, (self.framework, replace(training, steps=0)))[0]
        for outcome in self.trained(group_size, training):
            for name in ("frozen", "unused", "empty"):
                assert outcome.parameters[name].tobytes() == before[name].tobytes(), f"{name} was changed"
