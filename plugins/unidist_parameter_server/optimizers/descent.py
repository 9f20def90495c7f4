"""Gradient descent with momentum, as PyTorch and as Keras write it, and Adagrad."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import ClassVar

import numpy as np
from typing_extensions import override

from unidist_parameter_server.optimizers.interface import FlatStep, NativeForm, Rule, decayed, descend


@dataclass(frozen=True)
class Momentum(Rule):
    """Gradient descent; the momentum is of gradients, as in PyTorch (Sutskever et al. 2013 has it of steps).

    Args:
        rate: the learning rate.
        momentum: 0 for none.
        dampening: of the gradient in the momentum, except in the first update.
        nesterov: step by the gradient and the momentum after it.
        weight_decay: the parameters times this are added to the gradient.
    """

    rate: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    @property
    @override
    def local_rate(self) -> float:
        return self.rate

    @override
    def native_form(self) -> NativeForm | None:
        return ("momentum", tuple(map(float, astuple(self)))) if type(self) is Momentum else None

    @override
    def apply(self, step: FlatStep) -> None:
        gradient = decayed(step, self.weight_decay)
        direction = gradient
        if step.new_slots and self.momentum:
            (before,), (after,) = step.slots, step.new_slots
            if step.count == 1:
                after[:] = gradient
            else:
                np.multiply(before, self.momentum, out=after)
                if self.dampening:
                    np.multiply(gradient, 1.0 - self.dampening, out=step.scratch[1])
                    np.add(after, step.scratch[1], out=after)
                else:
                    np.add(after, gradient, out=after)
            direction = after
            if self.nesterov:
                np.multiply(after, self.momentum, out=step.scratch[1])
                np.add(step.scratch[1], gradient, out=step.scratch[1])
                direction = step.scratch[1]
        elif step.new_slots:
            step.new_slots[0][:] = step.slots[0]
        descend(step, direction, self.rate * step.factor)


@dataclass(frozen=True)
class Velocity(Rule):
    """Gradient descent as Keras' `SGD` does it: the momentum is of steps, with the rate of their time.

    Args:
        rate: the learning rate.
        momentum: 0 for none.
        nesterov: step by the velocity after it.
        weight_decay: the parameters are multiplied by 1 - rate * weight_decay before.
    """

    rate: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    @property
    @override
    def local_rate(self) -> float:
        return self.rate

    @override
    def native_form(self) -> NativeForm | None:
        return ("velocity", tuple(map(float, astuple(self)))) if type(self) is Velocity else None

    @override
    def apply(self, step: FlatStep) -> None:
        rate = self.rate * step.factor
        np.multiply(step.values, 1.0 - rate * self.weight_decay, out=step.new_values)
        np.multiply(step.change, -rate, out=step.scratch[0])
        if step.new_slots and self.momentum:
            (before,), (after,) = step.slots, step.new_slots
            np.multiply(before, self.momentum, out=after)
            np.add(after, step.scratch[0], out=after)
            if self.nesterov:
                np.multiply(after, self.momentum, out=step.scratch[1])
                np.add(step.new_values, step.scratch[1], out=step.new_values)
            else:
                step.scratch[0][:] = after
        elif step.new_slots:
            step.new_slots[0][:] = step.slots[0]
        np.add(step.new_values, step.scratch[0], out=step.new_values)


@dataclass(frozen=True)
class Adagrad(Rule):
    """Adagrad (Duchi et al. 2011).

    Args:
        rate: the learning rate.
        rate_decay: the rate of update t is divided by 1 + (t - 1) * rate_decay.
        epsilon: added to the divisor.
        epsilon_in_root: it is added to the sum of squares instead, as in Keras.
        initial: of the sum of squares.
        weight_decay: the parameters times this are added to the gradient.
        decoupled: instead, the parameters are multiplied by 1 - rate * weight_decay before, as in Keras.
    """

    rate: float
    rate_decay: float = 0.0
    epsilon: float = 1e-10
    epsilon_in_root: bool = False
    initial: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = False

    slots: ClassVar[tuple[str, ...]] = ("sum_of_squares",)

    @property
    @override
    def first_value(self) -> float:
        return self.initial

    @property
    @override
    def local_rate(self) -> float:
        return self.rate

    @override
    def native_form(self) -> NativeForm | None:
        return ("adagrad", tuple(map(float, astuple(self)))) if type(self) is Adagrad else None

    @override
    def apply(self, step: FlatStep) -> None:
        rate = self.rate * step.factor
        gradient = decayed(step, 0.0 if self.decoupled else self.weight_decay)
        after = step.new_slots[0]
        np.multiply(gradient, gradient, out=step.scratch[1])
        np.add(step.slots[0], step.scratch[1], out=after)
        if self.epsilon_in_root:
            np.add(after, self.epsilon, out=step.scratch[1])
            np.sqrt(step.scratch[1], out=step.scratch[1])
        else:
            np.sqrt(after, out=step.scratch[1])
            np.add(step.scratch[1], self.epsilon, out=step.scratch[1])
        np.divide(gradient, step.scratch[1], out=step.scratch[1])
        np.multiply(step.scratch[1], -rate / (1.0 + (step.count - 1) * self.rate_decay), out=step.scratch[1])
        kept = 1.0 - rate * self.weight_decay if self.decoupled else 1.0
        np.multiply(step.values, kept, out=step.new_values)
        np.add(step.new_values, step.scratch[1], out=step.new_values)
