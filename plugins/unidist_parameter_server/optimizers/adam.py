"""Adam and AdamW."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import ClassVar

import numpy as np
from typing_extensions import override

from unidist_parameter_server.optimizers.interface import FlatStep, NativeForm, Rule, decayed


@dataclass(frozen=True)
class Adam(Rule):
    """Adam (Kingma and Ba 2015, https://arxiv.org/abs/1412.6980) and AdamW (Loshchilov and Hutter 2019, 1711.05101).

    Args:
        rate: the learning rate.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of squares.
        epsilon: added to the root of the corrected mean of squares.
        epsilon_hat: it is added to the root before the correction of the bias instead, as in Keras.
        weight_decay: the parameters times this are added to the gradient.
        decoupled: instead, the parameters are multiplied by 1 - rate * weight_decay before (AdamW).
        bias1: beta1 as it is in the correction of the bias; None: the same. Keras has it in 32 bits there.
        bias2: beta2 likewise.
    """

    rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    epsilon_hat: bool = False
    weight_decay: float = 0.0
    decoupled: bool = False
    bias1: float | None = None
    bias2: float | None = None

    slots: ClassVar[tuple[str, ...]] = ("mean", "mean_of_squares")

    @property
    @override
    def local_rate(self) -> float:
        return self.rate

    @override
    def native_form(self) -> NativeForm | None:
        if type(self) is not Adam:
            return None
        biases = replace(self, bias1=self.bias1 or self.beta1, bias2=self.bias2 or self.beta2)
        return "adam", tuple(map(float, astuple(biases)))

    @override
    def apply(self, step: FlatStep) -> None:
        rate = self.rate * step.factor
        gradient = decayed(step, 0.0 if self.decoupled else self.weight_decay)
        mean, squares = step.new_slots
        work = step.scratch[1]
        np.multiply(step.slots[0], self.beta1, out=mean)
        np.multiply(gradient, 1.0 - self.beta1, out=work)
        np.add(mean, work, out=mean)
        np.multiply(step.slots[1], self.beta2, out=squares)
        np.multiply(gradient, gradient, out=work)
        np.multiply(work, 1.0 - self.beta2, out=work)
        np.add(squares, work, out=squares)
        bias1, bias2 = self.bias1 or self.beta1, self.bias2 or self.beta2
        correction = math.sqrt(1.0 - bias2**step.count)
        np.sqrt(squares, out=work)
        # rate / bias1 * mean / (root / correction + epsilon), with one division less
        np.add(work, self.epsilon * (1.0 if self.epsilon_hat else correction), out=work)
        np.divide(mean, work, out=work)
        np.multiply(work, -rate * correction / (1.0 - bias1**step.count), out=work)
        kept = 1.0 - rate * self.weight_decay if self.decoupled else 1.0
        np.multiply(step.values, kept, out=step.new_values)
        np.add(step.new_values, work, out=step.new_values)
