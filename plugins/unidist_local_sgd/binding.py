"""Interface between the strategy `local_sgd` and a framework: `BindingSpec("local_sgd", FRAMEWORK, path)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidist.buffer import Buffer
    from unidist.optim import MakesInnerStep
    from unidist_local_sgd.strategy import LocalSGD


class LocalSGDBinding(ABC):
    """Local SGD for one framework. Made without arguments."""

    @abstractmethod
    def inner_step(self, strategy: LocalSGD) -> MakesInnerStep:
        """Return a factory of inner steps, one for each optimizer; see `BringsInnerStep.inner_step`.

        An inner step calls `Synchronizer.begin` when its parameters are known, `Synchronizer.keep_start` before each
        update and `Synchronizer.run` after those at which `Synchronizer.advance` says so.
        """


class TrainedState(ABC):
    """Access to the parameters and the state of one optimizer, in a framework."""

    @abstractmethod
    def values(self) -> Sequence[Buffer]:
        """Return the present value of each parameter, flat, in memory that can be written to."""

    @abstractmethod
    def store(self, values: Sequence[Buffer]) -> None:
        """Give the parameters the values in the memory that `values` has returned."""

    @abstractmethod
    def slots(self) -> Mapping[str, Buffer]:
        """Return the optimizer's floating-point tensors by a name that is the same on every rank, without scalars."""

    @abstractmethod
    def store_slots(self, slots: Mapping[str, Buffer]) -> None:
        """Give the optimizer the values in the memory that `slots` has returned."""
