"""Updates by Keras optimizers whose variables and slots are bfloat16: computed in float32, and rounded.

What an optimizer updates in bfloat16 itself stands still as soon as the updates are smaller than half the distance to
the neighbouring number, 1/256 of the value. Here variables of Keras have a float32 tensor in place of the variable of
TensorFlow in them while the optimizer's class updates them, and what it has assigned is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from unidist.errors import UsageError
from unidist.gradients.precision import Precision, Rounding
from unidist_keras.slots import slot_lists
from unidist_tensorflow.gradients.tensors import Gradient
from unidist_tensorflow.optimizer.stochastic_rounding import Elements, round_stochastically

__all__ = ["Apply", "update_by"]

Apply = Callable[[Sequence[Gradient | None], Sequence[Any], Mapping[int, Sequence[Elements]]], None]
"""Updates variables by gradients; which elements of the model's variables those are that are parts, by identity."""


def update_by(optimizer: Any, plain: Any, precision: Precision | None) -> Apply:
    """Return what lets an optimizer update variables, as a run of this precision needs it.

    Args:
        optimizer: the bound optimizer.
        plain: its class before it was bound, or what has its `apply`.
        precision: of the run.

    Raises:
        UsageError: the optimizer keeps something that cannot be rounded so.
    """
    if precision is None or precision.rounding is None:
        return lambda gradients, variables, elements: plain.apply(optimizer, gradients, variables)
    for option, instead in (
        ("inner_optimizer", "give the optimizer that is in the LossScaleOptimizer"),
        ("use_ema", "leave use_ema out"),
        ("gradient_accumulation_steps", "use the strategy accumulate=N"),
    ):
        if getattr(optimizer, option, None):
            raise UsageError(f"precision=bf16:states=bf16 and {option} of {plain.__name__}: {instead}, or states=bf16")
    return _NarrowUpdate(optimizer, plain, precision.rounding)


class _NarrowUpdate:
    """See `Apply`.

    Args:
        optimizer: the bound optimizer.
        plain: see `update_by`.
        rounding: of what it has updated.
    """

    def __init__(self, optimizer: Any, plain: Any, rounding: Rounding) -> None:
        self._optimizer, self._plain, self._rounding = optimizer, plain, rounding

    def __call__(
        self,
        gradients: Sequence[Gradient | None],
        variables: Sequence[Any],
        elements: Mapping[int, Sequence[Elements]],
    ) -> None:
        """Update the variables."""
        optimizer = self._optimizer
        number = tf.cast(optimizer.iterations.value, tf.uint32)
        kept = list(self._kept(variables, elements))
        narrow = {id(variable) for variable, *_ in kept}
        wide = [
            tf.cast(tf.convert_to_tensor(gradient), tf.float32)
            if gradient is not None and id(variable) in narrow
            else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        values = [_Value(variable) for variable, *_ in kept]
        with _in_place(values):
            self._plain.apply(optimizer, wide, variables)
        for value, (variable, use, parts) in zip(values, kept, strict=True):
            if not value.is_assigned:
                continue  # it has no gradient
            found = value.tensor
            if self._rounding is Rounding.STOCHASTIC:
                found = round_stochastically(found, parts, use, number)
            variable.assign(tf.cast(found, tf.bfloat16))

    def _kept(
        self, variables: Sequence[Any], elements: Mapping[int, Sequence[Elements]]
    ) -> Iterator[tuple[Any, str, Sequence[Elements]]]:
        """Return variables and slots in bfloat16, the use of each, and which elements these are."""
        optimizer = self._optimizer
        lists = slot_lists(optimizer)
        for variable in variables:
            if not _is_narrow(variable):
                continue
            place = optimizer._get_variable_index(variable)
            parts = elements.get(id(variable)) or [Elements(place, 0, variable.shape.num_elements())]
            yield variable, "", parts
            for use, slots in lists.items():
                slot = slots[place]
                if slot is None or not _is_narrow(slot):
                    continue
                alike = tuple(slot.shape) == tuple(variable.shape)
                yield slot, use, parts if alike else [Elements(parts[0].place, 0, slot.shape.num_elements())]


def _is_narrow(variable: Any) -> bool:
    return isinstance(variable, keras.Variable) and variable.dtype == "bfloat16"


class _Value:
    """Acts as the variable of TensorFlow in a variable of Keras, in float32.

    Args:
        variable: of Keras.
    """

    dtype = tf.float32

    def __init__(self, variable: Any) -> None:
        plain = variable._value
        self.variable = variable
        self.tensor = tf.cast(tf.convert_to_tensor(plain), self.dtype)
        self.is_assigned = False
        self.name, self.shape, self._unique_id = plain.name, plain.shape, plain._unique_id

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.tensor, dtype, name=name)

    def __mul__(self, factor: Any) -> tf.Tensor:
        return self.tensor * factor

    def assign(self, value: Any) -> None:
        """Take a value."""
        self.tensor, self.is_assigned = tf.ensure_shape(tf.cast(value, self.dtype), self.shape), True

    def assign_add(self, value: Any) -> None:
        """Add a value."""
        self.assign(self.tensor + value)

    def assign_sub(self, value: Any) -> None:
        """Subtract a value."""
        self.assign(self.tensor - value)


@contextmanager
def _in_place(values: Sequence[_Value]) -> Iterator[None]:
    """Let variables of Keras have these values within the block."""
    before = [(value.variable._value, value.variable._dtype) for value in values]
    try:
        for value in values:
            value.variable._value, value.variable._dtype = value, "float32"
        yield
    finally:
        for value, (plain, dtype) in zip(values, before, strict=True):
            value.variable._value, value.variable._dtype = plain, dtype
