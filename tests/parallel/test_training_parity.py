"""However a step is run and whatever carries its gradients: training over ranks gives the numbers of one process.

The model and its loop are those of the strategy conformance suite: each framework's `conformance` module.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from mpi_pool import MpiPool, variables
from part_pools import PartPools
from tensorflow_ranks import ENVIRONMENT

from unidist.runtime import context
from unidist.runtime.plugin_manager import PluginManager
from unidist.testing._training import Training, largest_error, train_alone, train_on_rank
from unidist.testing.cases._arrays import Array
from unidist.testing.leaks import Resources

pytestmark = pytest.mark.parallel

WAYS = {
    "torch": ("torch", "eager"),
    "tensorflow": ("tensorflow", "eager"),
    "tf.function": ("tensorflow", "function"),
    "model.fit": ("tensorflow", "fit"),
}
STRATEGIES = {"data": 1, "accumulate=2": 2}  # passes that make an update
# By engine first: the ranks of mpi are started once.
ENGINES = ("mpi", "shm", "horovod")
JOBS = [(size, engine) for engine in ENGINES for size in (1, 2, 3)]
TRAINED = ("inner", "head", "bias", "narrow")
LIMITS = {"float64": 1e-12, "float32": 1e-5}
LONG = (("mpi", 1), ("mpi", 2), ("horovod", 1))
TIMEOUT = timedelta(seconds=240)
SLOW = {"UNIDIST_TIMEOUT_SEC": "120"}  # where three ranks import two frameworks, one waits for another

Parameters = dict[str, Array]


class Ranks:
    """What the cases run on: the session's ranks for TensorFlow, or those that mpirun starts.

    Attributes:
        references: what one process came to, by framework and training: each serves many cases.
    """

    def __init__(self, usual: PartPools, make_folder: Callable[[], Path]) -> None:
        self._usual = usual
        self._make_folder = make_folder
        self._mpi: MpiPool | None = None
        self._resources: frozenset[object] = frozenset()
        self.references: dict[tuple[str, Training], Parameters] = {}

    @property
    def resources(self) -> set[object]:
        """What the ranks hold in this process: no leak of the test that started them."""
        return self._usual.resources | self._resources

    def run(self, size: int, engine: str, function: Callable[..., Any], ranks: Sequence[Sequence[Any]]) -> list[Any]:
        """Run a function on ranks that can use the engine: `mpi` on those that mpirun starts.

        Args:
            size: number of ranks.
            engine: name of the engine.
            function: what to run.
            ranks: arguments of each rank.
        """
        if engine != "mpi":
            return self._usual.get(size, env=SLOW).run(function, per_rank_args=ranks, timeout=TIMEOUT)
        if self._mpi is None or self._mpi.num_proc != size:
            self._start(size)
        assert self._mpi is not None
        try:
            return self._mpi.run(function, per_rank_args=ranks, timeout=TIMEOUT)
        except BaseException:
            self.close()  # its ranks may be in any state
            raise

    def close(self) -> None:
        """End what mpirun started; the other ranks serve other tests."""
        pool, self._mpi, self._resources = self._mpi, None, frozenset()
        if pool is not None:
            pool.close()

    def _start(self, size: int) -> None:
        self.close()  # ranks with two frameworks are large, and those of MPI poll while they wait
        before = Resources.held()
        self._mpi = MpiPool(size, self._make_folder(), {"UNIDIST_ENGINE": "mpi", **variables({**ENVIRONMENT, **SLOW})})
        self._mpi.run(_start_and_end)  # MPI makes its files in shared memory now, not in somebody's test
        self._resources = frozenset(Resources.held().beyond(before))


def _start_and_end() -> None:
    context.init()
    context.shutdown()


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """The ranks of this module; the leak check asks it too."""
    pools = Ranks(tensorflow_pools, lambda: tmp_path_factory.mktemp("mpi"))
    yield pools
    pools.close()


class Case:
    """One way to run a step on ranks of one kind.

    Args:
        pools: where the ranks are from.
        size: number of ranks.
        engine: carries the gradients.
        way: of `WAYS`.
        strategy: of `STRATEGIES`.
    """

    def __init__(self, pools: Ranks, size: int, engine: str, way: str, strategy: str) -> None:
        self._pools, self.size, self._engine, self._strategy = pools, size, engine, strategy
        self._framework, mode = WAYS[way]
        plugins = PluginManager().load()
        if importlib.util.find_spec(plugins.frameworks.get(self._framework).requires) is None:
            pytest.skip(f"{self._framework} is not installed")
        available = plugins.engines.get(engine).load().availability()
        if not available.usable:
            pytest.skip(available.reason)
        passes = STRATEGIES[strategy]
        self._training = Training("adamw", steps=6 * passes, passes=passes, mode=mode)

    def together(self) -> list[Parameters]:
        """Train with unidist."""
        arguments = self._framework, self._strategy, self._engine, self._training
        outcomes = self._run(train_on_rank, [arguments] * self.size)
        return [outcome.parameters for outcome in outcomes]

    def apart(self) -> list[Parameters]:
        """Let each rank train on its own share, without an exchange."""
        return self._run(train_alone, [(self._framework, self._training, rank, self.size) for rank in range(self.size)])

    def one_process(self) -> Parameters:
        """Train in one process on the concatenated batches, in the framework's usual way, without unidist."""
        whole = replace(self._training.concatenated(), mode="")
        known, key = self._pools.references, (self._framework, whole)
        if key not in known:
            known[key] = self._run(train_alone, [key] * self.size)[0]
        return known[key]

    def _run(self, function: Callable[..., Any], ranks: Sequence[Sequence[Any]]) -> list[Any]:
        return self._pools.run(self.size, self._engine, function, ranks)


def check_equal(found: Parameters, expected: Parameters) -> None:
    """Raise AssertionError unless all parameters are equal within what rounding does."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = largest_error(found[name], value)
        assert error <= LIMITS[str(value.dtype)], f"{name} differs by {error:.2e}"


def cases() -> list[object]:
    """Return all combinations of `JOBS`, `WAYS` and `STRATEGIES`; those are `soak` that a shorter list leaves out.

    Among the others every pair of two of size, engine, way and strategy is there, but one rank is tested on one engine,
    and mpi, which needs other ranks for each number of them, with three.
    """
    found: list[object] = []
    for size, engine in JOBS:
        for way, strategy in itertools.product(WAYS, STRATEGIES):
            turn = size + ENGINES.index(engine) + list(WAYS).index(way) + list(STRATEGIES).index(strategy)
            is_quick = turn % len(STRATEGIES) == 0 and (engine, size) not in LONG
            found.append(pytest.param(size, engine, way, strategy, marks=[] if is_quick else [pytest.mark.soak]))
    return found


@pytest.mark.parametrize(("size", "engine", "way", "strategy"), cases())
def test_training_gives_the_numbers_of_one_process(
    rank_pools: Ranks, size: int, engine: str, way: str, strategy: str
) -> None:
    case = Case(rank_pools, size, engine, way, strategy)
    expected, found = case.one_process(), case.together()
    assert len(found) == size
    for parameters in found:
        check_equal(parameters, expected)
        for name, value in parameters.items():
            assert value.tobytes() == found[0][name].tobytes(), f"{name} differs between the ranks"


@pytest.mark.parametrize("strategy", ["data", pytest.param("accumulate=2", marks=pytest.mark.soak)])
@pytest.mark.parametrize("way", WAYS)
def test_the_check_fails_without_the_exchange(rank_pools: Ranks, way: str, strategy: str) -> None:
    case = Case(rank_pools, 3, "shm", way, strategy)
    expected, found = case.one_process(), case.apart()
    for name in TRAINED:
        for parameters, others in zip(found, [*found[1:], expected], strict=True):
            with pytest.raises(AssertionError, match=f"{name} differs"):
                check_equal({name: parameters[name]}, {name: others[name]})
