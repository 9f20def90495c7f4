"""Which optimizers of Keras may step on parts of variables is found out by trying."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from unidist.errors import UsageError
from unidist_tensorflow.optimizer.elementwise import counts_occurrences, needs_whole_variables

optimizers = keras.optimizers


class ByWholeNorm(keras.optimizers.SGD):
    """Divides each step by the norm of all gradients."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Divide, then update."""
        norm = keras.ops.sqrt(sum(keras.ops.sum(keras.ops.square(grad)) for grad in grads))
        super().apply([grad / norm for grad in grads], trainable_variables)


@pytest.mark.parametrize(
    ("optimizer", "needs_whole"),
    [
        (optimizers.SGD(0.0, momentum=0.9, nesterov=True, clipnorm=1.0), False),
        (optimizers.AdamW(optimizers.schedules.CosineDecay(0.0, 10), weight_decay=0.1, global_clipnorm=1.0), False),
        (optimizers.Muon(), True),
        (optimizers.Lamb(), True),
        (optimizers.Adafactor(), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_optimizer_needs_whole_variables_or_not(optimizer: Any, needs_whole: bool) -> None:
    before = [variable.numpy() for variable in optimizer.variables]
    assert needs_whole_variables(optimizer) is needs_whole
    assert [variable.numpy() for variable in optimizer.variables] == before
    assert not optimizer.built


def test_an_optimizer_that_looks_at_all_variables_at_once_is_refused() -> None:
    with pytest.raises(UsageError, match="ByWholeNorm updates a variable differently when there are others"):
        needs_whole_variables(ByWholeNorm(0.1))


def test_an_optimizer_that_cannot_be_made_from_its_configuration_is_refused() -> None:
    with pytest.raises(UsageError, match=r"MultiOptimizer could not be tried .*zero:whole=true"):
        needs_whole_variables(optimizers.MultiOptimizer(optimizers.Adam()))


@pytest.mark.parametrize(
    ("optimizer", "counts"),
    [
        (optimizers.SGD(momentum=0.9), False),
        (optimizers.SGD(clipnorm=1.0), True),
        (optimizers.Lion(), False),
        (optimizers.Adam(), True),
        (optimizers.Adamax(), True),
        (optimizers.Lamb(), True),
        (optimizers.Muon(), True),
        (optimizers.Adagrad(), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_optimizer_takes_the_occurrences_of_a_row_one_by_one_or_their_sum(optimizer: Any, counts: bool) -> None:
    assert counts_occurrences(optimizer) is counts
    assert not optimizer.built
