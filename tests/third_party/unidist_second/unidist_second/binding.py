"""The binding of an `SGD` to unidist's `Update`: gradients go out, and what comes back is stepped on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unidist.errors import PluginError
from unidist.gradients import ParameterInfo
from unidist.negotiation import gather_objects
from unidist.optim import Update
from unidist.training import Described, Description, check_equal
from unidist_second.framework import NumpyFramework, array_of
from unidist_second.models import SGD

Array = npt.NDArray[Any]


class NumpyInnerStep(ABC):
    """From reduced gradients to new parameters; made when the optimizer is bound, before there is an exchange."""

    sharded: bool = False

    @abstractmethod
    def step(self, present: Sequence[bool]) -> None:
        """Update the parameters on every rank; `present` says which have a gradient on any rank."""


class WholeStep(NumpyInnerStep):
    """Every rank updates all parameters."""

    def __init__(self, optimizer: SGD, update: Update) -> None:
        self._optimizer, self._update = optimizer, update

    def step(self, present: Sequence[bool]) -> None:
        """Update every parameter that has a gradient."""
        for index, (name, parameter) in enumerate(self._optimizer.parameters.items()):
            if present[index]:
                velocity = self._optimizer.velocities.setdefault(name, np.zeros_like(parameter))
                self._optimizer.update(parameter, velocity, _place(self._update, index, parameter))


class Binding:
    """One bound optimizer. Collective.

    Args:
        optimizer: whose parameters are trained.
        update: the framework-free side.
    """

    def __init__(self, optimizer: SGD, update: Update) -> None:
        self._optimizer, self._update = optimizer, update
        framework = NumpyFramework()
        inner: Any = WholeStep(optimizer, update)
        if update.inner_steps is not None:
            inner = update.inner_steps.inner_step(framework, update.context)(optimizer, SGD, update)
        if not isinstance(inner, NumpyInnerStep):
            raise PluginError(f"{type(inner).__qualname__} does not derive from unidist_second.binding.NumpyInnerStep")
        self._inner = inner
        self._agree()
        update.add_parameters(
            [
                ParameterInfo(name, parameter.shape, framework.dtype(parameter))
                for name, parameter in optimizer.parameters.items()
            ]
        )

    def step(self, gradients: Mapping[str, Array]) -> None:
        """Take the gradients of a pass; complete the update if it is the last of its window."""
        update = self._update
        for index, (name, parameter) in reversed(list(enumerate(self._optimizer.parameters.items()))):
            if name not in gradients:
                continue
            place = _place(update, index, parameter)
            if update.has_gradient(index):
                place += gradients[name]
            else:
                place[...] = gradients[name]
            update.gradient_ready(index)
        if update.begin_step():
            self._complete(None)

    def flush(self) -> bool:
        """See `SGD.flush`."""
        scale = self._update.short_window_scale()
        if scale is None:
            return False
        self._complete(scale)
        return not self._update.overflowed

    def _complete(self, scale: float | None) -> None:
        update = self._update
        present, _ = update.finish(scale=scale)
        update.conclude()
        if update.overflowed:
            update.reset_window()
            return
        self._inner.step(present)
        update.applied()

    def _agree(self) -> None:
        """Raise on every rank if the ranks' optimizers differ."""
        described = tuple(
            Described(name, parameter.shape, str(parameter.dtype), trained=True, sparse=False)
            for name, parameter in self._optimizer.parameters.items()
        )
        communicator = self._update.communicator
        everyone = gather_objects(communicator, Description(str(self._update.options), described))
        check_equal(everyone, communicator.members, self._update.context.topology.rank)


def bind(optimizer: SGD, update: Update, *, names: Mapping[str, Any] | None = None) -> SGD:
    """Let the optimizer's step go through `update`; see `unidist.optim.BindsOptimizers`. Collective."""
    optimizer.binding = Binding(optimizer, update)
    return optimizer


def _place(update: Update, index: int, parameter: Array) -> Array:
    """Return the place of a gradient, in the parameter's shape."""
    return array_of(update.buffer(index)).reshape(parameter.shape)
