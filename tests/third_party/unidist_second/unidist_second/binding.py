"""The binding of an `SGD` to unidist's `Update`: gradients go out, and what comes back is stepped on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unidist.buffer import Buffer
from unidist.checkpoint.format import Part
from unidist.elastic import follow_generations
from unidist.errors import PluginError
from unidist.gradients import ParameterInfo
from unidist.negotiation import gather_objects
from unidist.optim import TrainedState, Update
from unidist.runtime import current
from unidist.runtime_api import RuntimeAPI
from unidist.training import Described, Description, check_equal
from unidist_arrays.memory import array_of_buffer
from unidist_second.framework import NumpyFramework
from unidist_second.models import SGD

Array = npt.NDArray[Any]


class NumpyInnerStep(ABC):
    """From reduced gradients to new parameters; made when the optimizer is bound, before there is an exchange."""

    sharded: bool = False

    @abstractmethod
    def step(self, present: Sequence[bool]) -> None:
        """Update the parameters on every rank; `present` says which have a gradient on any rank."""

    @abstractmethod
    def velocities(self, *, make: bool) -> list[tuple[str, Part, Array]]:
        """Return this rank's velocities, for checkpoints, each with its parameter and the part of that it is for.

        Args:
            make: make those that are missing, to be loaded.
        """


class WholeStep(NumpyInnerStep):
    """Every rank updates all parameters."""

    def __init__(self, optimizer: SGD, update: Update) -> None:
        self._optimizer, self._update = optimizer, update

    def step(self, present: Sequence[bool]) -> None:
        """Update every parameter that has a gradient."""
        for index, (name, parameter) in enumerate(self._optimizer.parameters.items()):
            if present[index]:
                velocity = self._optimizer.velocities.setdefault(name, np.zeros_like(parameter))
                self._optimizer.update(
                    parameter, velocity, array_of_buffer(self._update.buffer(index), parameter.shape)
                )

    def velocities(self, *, make: bool) -> list[tuple[str, Part, Array]]:
        """Return the optimizer's."""
        return whole_velocities(self._optimizer, make=make)


def whole_velocities(optimizer: SGD, *, make: bool) -> list[tuple[str, Part, Array]]:
    """See `NumpyInnerStep.velocities`."""
    if make:
        optimizer.velocities = {name: np.zeros_like(each) for name, each in optimizer.parameters.items()}
    return [(name, Part.whole(each.shape), each) for name, each in optimizer.velocities.items()]


class NumpyState(TrainedState):
    """Parameters and velocities, in their own memory."""

    def __init__(self, optimizer: SGD) -> None:
        self._optimizer = optimizer

    def values(self) -> Sequence[Buffer]:
        """Return the parameters' memory."""
        return [NumpyFramework().buffer(array) for array in self._optimizer.parameters.values()]

    def store(self, values: Sequence[Buffer]) -> None:
        """Do nothing: the values are the parameters' memory."""

    def slots(self) -> Mapping[str, Buffer]:
        """Return the velocities' memory."""
        return {name: NumpyFramework().buffer(array) for name, array in self._optimizer.velocities.items()}

    def store_slots(self, slots: Mapping[str, Buffer]) -> None:
        """Do nothing, likewise."""


class Binding:
    """One bound optimizer. Collective.

    Args:
        optimizer: whose parameters are trained.
        update: the framework-free side.
    """

    def __init__(self, optimizer: SGD, update: Update) -> None:
        self._optimizer, self.distributed_update = optimizer, update
        update.trained = NumpyState(optimizer)
        self.inner: Any = WholeStep(optimizer, update)
        if update.inner_steps is not None:
            self.inner = update.inner_steps.inner_step(NumpyFramework(), update.context)(optimizer, SGD, update)
        if not isinstance(self.inner, NumpyInnerStep):
            raise PluginError(f"{type(self.inner).__qualname__} derives from no unidist_second.binding.NumpyInnerStep")
        self._begin()
        follow_generations(self)  # in an elastic job `rebind` is called in each

    def _begin(self) -> None:
        """Make what belongs to one runtime."""
        framework, update = NumpyFramework(), self.distributed_update
        self._agree()
        update.add_parameters(
            [
                ParameterInfo(name, parameter.shape, framework.dtype(parameter))
                for name, parameter in self._optimizer.parameters.items()
            ]
        )
        announcements = current().announcements
        self._updates = announcements.register(lambda: self._complete(None, is_joined=True))
        self._flushes = announcements.register(lambda: self._flush(is_joined=True))

    def rebind(self, context: RuntimeAPI) -> None:
        """Go on among the ranks of a new generation. Collective."""
        self.distributed_update.rebind(context)
        self._begin()

    def step(self, gradients: Mapping[str, Array]) -> None:
        """Take the gradients of a pass; complete the update if it is the last of its window."""
        update = self.distributed_update
        for index, (name, parameter) in reversed(list(enumerate(self._optimizer.parameters.items()))):
            if name not in gradients:
                continue
            place = array_of_buffer(update.buffer(index), parameter.shape)
            if update.has_gradient(index):
                place += gradients[name]
            else:
                place[...] = gradients[name]
            update.gradient_ready(index)
        if update.begin_step():
            if not update.is_local:
                self._updates.announce()  # to ranks that have joined
            self._complete(None)

    def flush(self) -> bool:
        """See `SGD.flush`."""
        if not self.distributed_update.is_local:
            self._flushes.announce()
        step = self.distributed_update.step
        self._flush()
        return self.distributed_update.step > step

    def _flush(self, *, is_joined: bool = False) -> None:
        scale = self.distributed_update.short_window_scale()
        if scale is not None:
            self._complete(scale, is_joined=is_joined)

    def _complete(self, scale: float | None, *, is_joined: bool = False) -> None:
        update = self.distributed_update
        present, _ = update.finish(scale=scale, is_joined=is_joined)
        update.conclude()
        if update.overflowed:
            update.reset_window()
            return
        actors, step = update.actors, update.step + 1
        if actors is not None and actors.wanted_before(step):
            actors.act_before(step, update.trained)
        self.inner.step(present)
        if actors is not None and actors.wanted_after(step):
            actors.act_after(step, update.trained)
        update.applied()

    def _agree(self) -> None:
        """Raise on every rank if the ranks' optimizers differ."""
        described = tuple(
            Described(name, parameter.shape, str(parameter.dtype), trained=True, sparse=False)
            for name, parameter in self._optimizer.parameters.items()
        )
        update = self.distributed_update
        everyone = gather_objects(update.communicator, Description(str(update.options), described))
        check_equal(everyone, update.communicator.members, update.context.topology.rank)


def bind(optimizer: SGD, update: Update, *, names: Mapping[str, Any] | None = None) -> SGD:
    """Let the optimizer's step go through `update`; see `unidist.optim.BindsOptimizers`. Collective."""
    optimizer.binding = Binding(optimizer, update)
    return optimizer
