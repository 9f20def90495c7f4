"""Synchronizer of ranks that are threads come to the numbers of a plain simulation, whatever the options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override
from unidist_second.framework import NumpyFramework

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator
from unidist.gradients import ParameterInfo
from unidist.optim import TrainedState
from unidist.optim.actors import Actors
from unidist.optim.script_position import DrawnBatches
from unidist.testing import ThreadWorld
from unidist.timeline import Recorder
from unidist.topology import Topology
from unidist.training import EndOfRun
from unidist_arrays.memory import buffer_of_array
from unidist_local_sgd import LocalSGD, Synchronizer
from unidist_local_sgd.schedule import divide

SHAPES = [(3, 2), (4,), (1,), (2, 2)]
RATE, STEPS = 0.3, 13
OPTIONS = st.builds(
    LocalSGD,
    every=st.integers(3, 5),
    after=st.integers(0, 3),
    outer=st.sampled_from(["average", "sgd", "momentum", "nesterov"]),
    outer_lr=st.just(None),
    fragments=st.integers(1, 3),
    delay=st.integers(0, 2),
    mix=st.sampled_from([0.0, 0.25]),
    compression=st.sampled_from([None, "none"]),
)


class Arrays(TrainedState):
    """Parameters that are arrays, and an optimizer with one slot."""

    def __init__(self) -> None:
        random = np.random.default_rng(5)
        self.arrays = [random.standard_normal(shape) for shape in SHAPES]
        self.slot = np.zeros(3)

    @override
    def values(self) -> Sequence[Buffer]:
        return [buffer_of_array(each) for each in self.arrays]

    @override
    def store(self, values: Sequence[Buffer]) -> None:
        """Do nothing: the values are the arrays' memory."""

    @override
    def slots(self) -> Mapping[str, Buffer]:
        return {"slot": buffer_of_array(self.slot)}

    @override
    def store_slots(self, slots: Mapping[str, Buffer]) -> None:
        """Do nothing, likewise."""


class Bound(SimpleNamespace):
    """What stands for an update, and a weak reference can refer to."""


class Runtime:
    """What a synchronizer asks of a context."""

    def __init__(self, plugins: Any, topology: Topology, communicator: Communicator) -> None:
        self.plugins, self.topology, self.recorder = plugins, topology, Recorder()
        self._communicator = communicator
        self._end = EndOfRun(self)  # type: ignore[arg-type]

    is_elastic = False

    def axis(self, name: str) -> Communicator:
        """Return the communicator over all ranks."""
        return self._communicator

    def owned(self, kind: Any) -> Any:
        """Return the end of the run, which alone is asked for."""
        assert kind in (EndOfRun, DrawnBatches)
        return self._end if kind is EndOfRun else DrawnBatches(self)  # type: ignore[arg-type]


def targets(rank: int, step: int) -> list[Any]:
    """Return what the parameters of a rank are drawn to in a step."""
    random = np.random.default_rng(100 * rank + step)
    return [random.standard_normal(shape) for shape in SHAPES]


def make(strategy: LocalSGD, communicator: Communicator) -> tuple[Synchronizer, Arrays, Any]:
    """Return the synchronizer of one rank, its parameters, and what stands for the update."""
    plugins = SimpleNamespace(registry=lambda kind: REGISTRY)
    topology = Topology(communicator.rank, communicator.size, communicator.rank, communicator.size)
    context = RUNTIMES[communicator.rank] = Runtime(plugins, topology, communicator)
    update: Any = Bound(
        step=0,
        context=context,
        communicator=communicator,
        options=SimpleNamespace(communicator=lambda context, memory: communicator.split(range(communicator.size))),
        make_exchanges_by=lambda factory: None,
        follow=lambda follower: None,
        trained=Arrays(),
        parameters=[ParameterInfo(str(number), shape, DType.FLOAT64) for number, shape in enumerate(SHAPES)],
    )
    trained = update.trained
    synchronizer = Synchronizer(strategy, update, NumpyFramework())
    synchronizer.begin(update.parameters)
    return synchronizer, trained, update


RUNTIMES: dict[int, Any] = {}
"""Of the present example, by rank."""


def _registry() -> Any:
    from unidist.gradients import CompressorSpec
    from unidist.runtime.plugin_manager import PluginManager

    return PluginManager().load().registry(CompressorSpec)


REGISTRY = _registry()


def train(strategy: LocalSGD, communicator: Communicator, steps: int = STEPS) -> tuple[Synchronizer, Arrays]:
    """Make these updates on one rank; while it warms up, all ranks are drawn to the mean of their targets."""
    synchronizer, trained, update = make(strategy, communicator)
    actors = Actors(update, [synchronizer])
    for step in range(steps):
        ranks = range(communicator.size) if step < strategy.after else [communicator.rank]
        drawn = [np.mean(each, axis=0) for each in zip(*(targets(rank, step) for rank in ranks), strict=True)]
        if actors.wanted_before(update.step + 1):
            actors.act_before(update.step + 1, trained)
        for array, target in zip(trained.arrays, drawn, strict=True):
            array -= RATE * (array - target)
        trained.slot += communicator.rank
        update.step += 1
        if actors.wanted_after(update.step):
            actors.act_after(update.step, trained)
    return synchronizer, trained


def simulate(strategy: LocalSGD, size: int) -> list[list[Any]]:
    """Return the parameters of each rank, by the formulas."""
    replicas = [Arrays().arrays for _ in range(size)]
    start = Arrays().arrays
    speed = [np.zeros(shape) for shape in SHAPES]
    outer = strategy.outer_optimizer
    parts = divide([int(np.prod(shape)) for shape in SHAPES], strategy.fragments)
    sent: dict[int, dict[int, Any]] = {}
    for step in range(STEPS):
        for rank, own in enumerate(replicas):
            ranks = range(size) if step < strategy.after else [rank]
            for i, each in enumerate(own):
                own[i] = each - RATE * (each - np.mean([targets(other, step)[i] for other in ranks], axis=0))
        if step < strategy.after:
            start = [each.copy() for each in replicas[0]]
            continue
        position = step + 1 - strategy.after
        for k, part in enumerate(parts):
            begin = -(-(k + 1) * strategy.every // len(parts))
            if position >= begin and (position - begin) % strategy.every == 0:
                sent[k] = {i: start[i] - np.mean([own[i] for own in replicas], axis=0) for i in part}
            arrived = position - strategy.delay
            if arrived >= begin and (arrived - begin) % strategy.every == 0:
                for i, gradient in sent.pop(k).items():
                    speed[i] = outer.momentum * speed[i] + gradient
                    ahead = gradient + outer.momentum * speed[i] if outer.kind == "nesterov" else speed[i]
                    start[i] = start[i] - outer.rate * ahead
                    for own in replicas:
                        own[i] = strategy.mix * own[i] + (1 - strategy.mix) * start[i]
    return replicas


@settings(max_examples=30)
@given(OPTIONS, st.integers(1, 3))
def test_synchronizations_come_to_the_numbers_of_the_formulas(strategy: LocalSGD, size: int) -> None:
    expected = simulate(strategy, size)
    with ThreadWorld(size) as world:
        for rank, (_, trained) in enumerate(world.run(lambda communicator: train(strategy, communicator))):
            for found, wanted in zip(trained.arrays, expected[rank], strict=True):
                assert np.max(np.abs(found - wanted)) < 1e-12


def test_a_new_generation_takes_the_mean_of_those_with_the_commit_of_rank_0() -> None:
    strategy = LocalSGD(4, outer="nesterov")

    def run(communicator: Communicator) -> tuple[Any, Any, Any]:
        synchronizer, trained = train(strategy, communicator, steps=6)
        before = [each.copy() for each in trained.arrays]
        kept = synchronizer.kept()
        if communicator.rank == 2:  # as if it held an older commit
            synchronizer.restore(replace(kept, position=5))
        synchronizer.synchronize_generation(RUNTIMES[communicator.rank])
        momentum = [np.array(memory.bytes().cast("d")) for _, memory in synchronizer.tensors().values()]
        starts = [np.array(memory.bytes().cast("d")) for memory in kept.starts]
        return before, trained.arrays, (momentum, starts, kept.velocities)

    with ThreadWorld(3) as world:
        found = world.run(run)
    (one, after, (momentum, starts, velocities)), (two, also, (others, *_)) = found[0], found[1]
    for index, start in enumerate(starts):
        gradient = start - (one[index] + two[index]).ravel() / 2
        speed = 0.9 * np.array(velocities[index].bytes().cast("d")) + gradient
        assert np.max(np.abs(after[index].ravel() - (start - 0.7 * (gradient + 0.9 * speed)))) < 1e-12
        assert np.array_equal(after[index], also[index])
        assert np.array_equal(momentum[index], others[index])
        assert np.array_equal(momentum[index], found[2][2][0][index]), "also on the rank that was behind"


def test_before_a_checkpoint_parameters_and_optimizer_state_are_made_equal() -> None:
    strategy = LocalSGD(4, outer="nesterov", fragments=2, delay=1)

    def run(communicator: Communicator) -> tuple[Any, Any, Any]:
        synchronizer, trained = train(strategy, communicator, steps=6)
        synchronizer.before_save()
        momentum = [np.array(memory.bytes().cast("d")) for _, memory in synchronizer.tensors().values()]
        return trained.arrays, trained.slot, momentum

    with ThreadWorld(3) as world:
        first, *others = world.run(run)
    assert np.all(first[1] == 6.0), "the mean of 0, 6 and 12"
    for other in others:
        assert np.all(other[1] == first[1])
        for kind in (0, 2):
            for own, theirs in zip(first[kind], other[kind], strict=True):
                assert np.array_equal(own, theirs)


def test_a_run_shorter_than_the_window_says_that_ranks_have_trained_alone() -> None:
    from unidist_local_sgd.synchronization import _Run

    run = _Run(every=100)
    assert run.never_synchronized() == ""
    run.num_updates = 7
    assert "local_sgd=100: the run ends after 7 updates" in run.never_synchronized()
    run.has_synchronized = True
    assert run.never_synchronized() == ""
