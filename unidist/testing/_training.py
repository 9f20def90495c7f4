"""Common parts of the strategy conformance suite's trainings: the data, and its division over ranks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np

from unidist.runtime import context
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import set_variables
from unidist.testing.cases._arrays import Array
from unidist.testing.recording import RecordingCommunicator


@dataclass(frozen=True)
class Training:
    """One run.

    Args:
        optimizer: "sgd" (with momentum) or "adamw".
        steps: calls of `step`.
        batch: samples of all ranks together in one of them; divides by 1, 2, 3 and 4.
        passes: calls of `step` that make one update.
        loss_factor: the loss is multiplied by this.
        flush: call `flush` at the end.
        mode: the way in which the framework runs a step, one of its `FrameworkTraining.modes`; "" for the first.
    """

    optimizer: str = "sgd"
    steps: int = 10
    batch: int = 12
    passes: int = 1
    loss_factor: float = 1.0
    flush: bool = False
    mode: str = ""

    def data(self, width: int, classes: int) -> tuple[Array, Array]:
        """Return features `(n, width)` and labels `(n,)` of all batches, the same on every rank."""
        rng = np.random.default_rng(7)
        n = self.steps * self.batch
        return rng.standard_normal((n, width)), rng.integers(0, classes, n)

    def shares(self, rank: int, size: int) -> Iterator[slice]:
        """Yield the samples of each call of `step` for one of `size` ranks."""
        each = self.batch // size
        for start in range(0, self.steps * self.batch, self.batch):
            yield slice(start + rank * each, start + (rank + 1) * each)

    def concatenated(self) -> Training:
        """Return the same training for one process without accumulation: a whole window is one batch."""
        assert self.steps % self.passes == 0, "a short window is another training"
        return replace(self, steps=self.steps // self.passes, batch=self.batch * self.passes, passes=1, flush=False)


@dataclass(frozen=True)
class Quadratic:
    """A problem whose solution is known: the sum over ranks of c (w - t)^2 / 2, with c and t of each rank's own.

    Args:
        steps: updates by plain gradient descent, with a learning rate of 0.2.
        passes: calls of `step` that make one update.
        common_optimum: t is the same on every rank.
    """

    steps: int = 200
    passes: int = 1
    common_optimum: bool = False

    def terms(self, rank: int) -> tuple[Array, Array]:
        """Return t and c of a rank, `(8, 16)` each, float32."""
        rng = np.random.default_rng(rank)
        curvature = rng.uniform(0.5, 1.5, (8, 16)).astype(np.float32)
        place = np.random.default_rng(99 if self.common_optimum else 100 + rank)
        return place.standard_normal((8, 16)).astype(np.float32), curvature

    def error(self, weights: Array, size: int) -> float:
        """Return how far weights are from the optimum of `size` ranks, relative to its norm."""
        terms = [self.terms(rank) for rank in range(size)]
        optimum = sum(c * t for t, c in terms) / sum(c for _, c in terms)
        return float(np.linalg.norm(weights - optimum) / np.linalg.norm(optimum))


class FrameworkTraining(Protocol):
    """The interface of the module `FrameworkSpec.conformance`, by which a framework adapter supports the suite.

    Its model has parameters of these names: `inner`, `head` and `bias`, trained, float64; `narrow`, trained, float32;
    `frozen`, not to be trained; `unused`, in no loss; `empty`, of no elements. `inner` is used twice.

    Attributes:
        modes: the ways in which the framework runs a step ("eager", "function"), the usual one first.
    """

    modes: Sequence[str]

    def train(self, training: Training, *, distributed: bool, rank: int, size: int) -> dict[str, Array]:
        """Train on one rank's share and return the parameters by name.

        Args:
            training: what to do, in which of the modes.
            distributed: exchange gradients by unidist, which is initialized; False: leave the exchange out.
            rank: whose share.
            size: number of shares.
        """

    def descend(self, quadratic: Quadratic, *, rank: int) -> Array:
        """Solve a problem by plain gradient descent, from zeros, with unidist; return the weights.

        For strategies that differ from one process by design. A call of `step` has the loss c (w - t)^2 / 2.

        Args:
            quadratic: how long; `terms(rank)` are the numbers.
            rank: whose terms.
        """

    def init(self) -> None:
        """Start unidist."""

    def shutdown(self) -> None:
        """End unidist."""


@dataclass(frozen=True)
class RankOutcome:
    """The result of a rank.

    Args:
        parameters: by name.
        operations: names of the communicator's operations by which gradients were exchanged, in order.
        steps: the numbers of the updates that plugins were told of.
    """

    parameters: dict[str, Array]
    operations: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()


def train_alone(framework: str, training: Training, rank: int = 0, size: int = 1) -> dict[str, Array]:
    """Train without unidist, on one of `size` shares."""
    module = _module(framework)
    return module.train(_with_mode(training, module), distributed=False, rank=rank, size=size)


def train_on_rank(
    framework: str,
    strategy: str,
    engine: str,
    training: Training,
    *,
    record: bool = False,
    num_shares: int | None = None,
) -> RankOutcome:
    """Train with unidist, from `init` to `shutdown`, on a rank.

    Args:
        framework: its name.
        strategy: strategy line.
        engine: its name.
        training: what to do.
        record: bring back what was communicated.
        num_shares: into which batches are divided; default: as many as there are ranks.
    """
    module = _module(framework)
    training = _with_mode(training, module)
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": engine}):
        module.init()
        try:
            runtime = context.current()
            records = _record(runtime) if record else []
            steps = _count(runtime)
            topology = runtime.topology
            size = num_shares or topology.world_size
            parameters = module.train(training, distributed=True, rank=topology.rank, size=size)
        finally:
            module.shutdown()
    return RankOutcome(parameters, tuple(record.operation for record in records), tuple(steps))


def descend_on_rank(framework: str, strategy: str, engine: str, quadratic: Quadratic) -> RankOutcome:
    """Solve a problem with unidist, from `init` to `shutdown`, on a rank; its weights are called "weights"."""
    module = _module(framework)
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": engine}):
        module.init()
        try:
            runtime = context.current()
            steps = _count(runtime)
            weights = module.descend(quadratic, rank=runtime.topology.rank)
        finally:
            module.shutdown()
    return RankOutcome({"weights": weights}, steps=tuple(steps))


def largest_error(found: Array, expected: Array) -> float:
    """Return the largest difference, relative where the expected value is above 1."""
    if not expected.size:
        return 0.0
    return float(np.max(np.abs(found - expected) / np.maximum(np.abs(expected), 1.0)))


def _record(runtime: context.Context) -> list[Any]:
    """Let every communicator that strategies ask for from now on write down what it is used for."""
    records: list[Any] = []
    make = runtime.new_communicator

    def recording(axis: str, *, memory: str = "host") -> RecordingCommunicator:
        return RecordingCommunicator(make(axis, memory=memory), records)

    runtime.new_communicator = recording  # type: ignore[method-assign]  # this run only
    return records


def _count(runtime: context.Context) -> list[int]:
    """Write down the number of every update that the runtime is told of from now on."""
    steps: list[int] = []
    tell = runtime.step_applied

    def counting(step: int) -> None:
        steps.append(step)
        tell(step)

    runtime.step_applied = counting  # type: ignore[method-assign]  # this run only
    return steps


def _with_mode(training: Training, module: FrameworkTraining) -> Training:
    if training.mode and training.mode not in module.modes:
        raise ValueError(f"no mode {training.mode!r} of training in this framework; choices: {', '.join(module.modes)}")
    return replace(training, mode=training.mode or module.modes[0])


def _module(framework: str) -> FrameworkTraining:
    spec = PluginManager().load().frameworks.get(framework)
    if not spec.conformance:
        raise ValueError(f"framework {framework!r} has no half of the conformance suite (FrameworkSpec.conformance)")
    module: FrameworkTraining = cast(Any, importlib.import_module(spec.conformance))
    return module
