"""What a training under ZeRO is, in either framework, and how it is run beside one process on the ranks of a pool."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, cast

from unidist.communicator import Communicator
from unidist.runtime import context
from unidist.settings.environment import set_variables
from unidist.testing._training import largest_error
from unidist.testing.recording import Record, RecordingCommunicator

BATCH = 12
"""Samples of all ranks together; 1, 2, 3 and 4 divide it."""

LONG = timedelta(seconds=900)

OVERFLOWS = 2
"""In a training whose loss is scaled, the update that all ranks leave out because of an infinity on rank 0."""

Parameters = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        strategy: the strategy line, without what the other arguments say.
        optimizer: name of the backend's `OPTIMIZERS`.
        passes: calls of a step that make an update.
        steps: updates, to the end of the training.
        max_norm: gradients are clipped to it.
        scaled: the loss is scaled as for 16 bits, and overflows once.
        engine: carries the gradients.
        layered: train a model of layers, else one with parameters of its own.
        first: number of the first update, where the training goes on.
        loads: folder of a checkpoint to begin with.
        saves: folder for one at the end.
        saves_early: folder for one before the first update.
    """

    framework: ClassVar[str]

    strategy: str = "zero=2"
    optimizer: str = "adamw"
    passes: int = 1
    steps: int = 10
    max_norm: float | None = None
    scaled: bool = False
    engine: str = "shm"
    layered: bool = False
    first: int = 0
    loads: str = ""
    saves: str = ""
    saves_early: str = ""

    def line(self) -> str:
        """Return the whole strategy line."""
        found = [self.strategy]
        found += [f"accumulate={self.passes}"] if self.passes > 1 else []
        found += [f"clip_norm={self.max_norm}"] if self.max_norm is not None else []
        return ",".join(found)

    def part(self, number: int, folder: Path) -> Self:
        """Return the part of a training that goes on where the part before it has ended, each of so many updates.

        Args:
            number: how many parts there have been.
            folder: where the checkpoints are.
        """
        first, loads = number * self.steps, str(folder / f"{self.optimizer}-{number - 1}") if number else ""
        saves = str(folder / f"{self.optimizer}-{number}")
        return replace(self, steps=first + self.steps, first=first, loads=loads, saves=saves)

    def alone(self) -> Self:
        """Return the training of one process that it is compared with: all of it, in one go."""
        return replace(self, strategy="", engine="", first=0, loads="", saves="", saves_early="")


@dataclass(frozen=True)
class TorchCase(Case):
    """One training in PyTorch.

    Args:
        calls_closure: step with a closure.
        hosts: the ranks make believe that they are on so many.
        unfreezes: a parameter is trained from the third update on, in a group that is added then.
    """

    framework: ClassVar[str] = "torch"

    calls_closure: bool = False
    hosts: int = 1
    unfreezes: bool = False

    def line(self) -> str:
        """See `Case.line`. What is of 64 bits stays so; the scale is a power of two, and so changes no digit."""
        return super().line() + (",precision=fp16:loss_scale=1024:growth_interval=3" if self.scaled else "")

    def alone(self) -> TorchCase:
        """See `Case.alone`."""
        return replace(super().alone(), calls_closure=False, hosts=1)


@dataclass(frozen=True)
class KerasCase(Case):
    """One training in Keras.

    Args:
        mode: "eager", "function" or "fit".
        options: more arguments of the optimizer, by name.
        excluded: names that are left out of weight decay.
        constrained: the head's rows are kept at unit norm.
        noisy: with dropout and batch normalization, which only one rank has like one process.
        deferred: the layered model is built without values, with another seed on each rank.
    """

    framework: ClassVar[str] = "keras"

    mode: str = "eager"
    options: tuple[tuple[str, Any], ...] = ()
    excluded: tuple[str, ...] = ()
    constrained: bool = False
    noisy: bool = False
    deferred: bool = False

    def alone(self) -> KerasCase:
        """See `Case.alone`. What a function computes is what its operations compute one by one."""
        mode = "fit" if self.mode == "fit" else "eager"
        return replace(super().alone(), mode=mode, deferred=False)


class Backend(Protocol):
    """What each framework brings: the modules `_torch_zero` and `_keras_zero`.

    Attributes:
        ud: the facade.
    """

    ud: Any

    def surroundings(self) -> AbstractContextManager[object]:
        """Return what is around every training."""

    def train_alone(self, case: Any, *, rank: int = 0, size: int = 1) -> Parameters:
        """Train in one process without unidist; return copies of the parameters by name.

        Args:
            case: what to train.
            rank: takes this rank's share of the data.
            size: of so many shares.
        """

    def train(self, case: Any) -> Parameters:
        """Train on this rank's share of the data, unidist being initialised; return all parameters by name."""

    def record_step(self, case: Any) -> Traffic:
        """Do an update, then return what the next one communicates, unidist being initialised."""


@dataclass(frozen=True)
class Traffic:
    """What one update gives to collectives on one rank.

    Args:
        nbytes: by operation: of what a rank gives.
        own: bytes of this rank's share of the parameters, padding included.
        whole: bytes of all shares.
        parameters: bytes of what is trained.
    """

    nbytes: dict[str, int]
    own: int
    whole: int
    parameters: int


def backend(framework: str) -> Backend:
    """Return the backend of a framework, which is imported here and not before."""
    return cast(Backend, importlib.import_module(f"_{framework}_zero"))


class Ranks(Protocol):
    """What runs trainings: a pool of any kind."""

    num_proc: int

    def run(self, func: Callable[..., Any], *, per_rank_args: Sequence[Sequence[Any]], timeout: timedelta) -> list[Any]:
        """See `RankPool.run`."""


def errors_on(ranks: Ranks, cases: Sequence[Case]) -> list[list[dict[str, float]]]:
    """Train each case, all of one framework, on the ranks and in one process; return what differs most, by parameter.

    Each of the trainings in one process runs on one of the ranks.

    Returns:
        For each rank, of its own parameters: the errors in each case.
    """
    alone = list(dict.fromkeys(case.alone() for case in cases))
    size = ranks.num_proc
    shares = [(alone[rank::size],) for rank in range(size)]
    references = {}
    for found in ranks.run(references_of, per_rank_args=shares, timeout=LONG):
        references.update(found)
    expected = [references[case.alone()] for case in cases]
    return ranks.run(errors_of, per_rank_args=[(cases, expected)] * size, timeout=LONG)


def references_of(cases: Sequence[Case]) -> dict[Case, Parameters]:
    """Train each case in one process, as `Case.alone` returns it."""
    found = {}
    for case in cases:
        half = backend(case.framework)
        with half.surroundings():
            found[case] = half.train_alone(case)
    return found


def errors_of(cases: Sequence[Case], expected: Sequence[Parameters]) -> list[dict[str, float]]:
    """Train each case on the ranks; return what differs most from what is expected, by parameter."""
    found = []
    for case, reference in zip(cases, expected, strict=True):
        half = backend(case.framework)
        with half.surroundings(), running(half, case):
            outcome = half.train(case)
        found.append({name: largest_error(outcome[name], value) for name, value in reference.items()})
    return found


def errors_without_exchange(cases: Sequence[Case]) -> list[dict[str, float]]:
    """Return what `errors_of` does, of ranks that train on their shares without knowing of each other."""
    half = backend(cases[0].framework)
    found = []
    for case in cases:
        with half.surroundings():
            expected = half.train_alone(case.alone())
            with running(half, replace(case, strategy="")):
                rank, size = half.ud.rank(), half.ud.size()
            outcome = half.train_alone(case.alone(), rank=rank, size=size)
        found.append({name: largest_error(outcome[name], value) for name, value in expected.items()})
    return found


def traffic_of(case: Case) -> Traffic:
    """Return what an update communicates."""
    half = backend(case.framework)
    with half.surroundings(), running(half, case):
        return half.record_step(case)


@contextmanager
def running(half: Backend, case: Case) -> Iterator[None]:
    """Let unidist run as the case says."""
    with set_variables({"UNIDIST_STRATEGY": case.line(), "UNIDIST_ENGINE": case.engine}):
        half.ud.init()
        try:
            yield
        finally:
            half.ud.shutdown()
            gc.collect()


def record(runtime: context.Context) -> list[Record]:
    """Let every communicator that strategies ask for from now on write down what it is used for."""
    records: list[Record] = []

    def recording(make: Callable[..., Communicator]) -> Callable[..., RecordingCommunicator]:
        return lambda axis, *, memory="host": RecordingCommunicator(make(axis, memory=memory), records)

    runtime.axis = recording(runtime.axis)  # type: ignore[method-assign]  # this run only, as is the next one
    runtime.new_communicator = recording(runtime.new_communicator)  # type: ignore[method-assign]
    return records


def by_operation(records: Sequence[Record]) -> dict[str, int]:
    """Return bytes by operation, as `Record` counts them, without the check of four bytes beside a gather."""
    found: dict[str, int] = {}
    for each in records:
        if each.operation == "allgather" and each.nbytes == 4:
            continue
        found[each.operation] = found.get(each.operation, 0) + each.nbytes
    return found
