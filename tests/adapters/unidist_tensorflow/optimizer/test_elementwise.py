"""Which optimizers of Keras may step on parts of variables is found out by trying."""

from __future__ import annotations

from collections.abc import Callable
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


FORMS = (
    ("embed/embeddings", (50, 6)),
    ("dense/kernel", (400, 300)),
    ("dense/bias", (9,)),
    ("conv/kernel", (3, 3, 4, 5)),
)
"""Paths and shapes of a model's variables."""


def normed(gradient: Any) -> Any:
    return gradient / keras.ops.sqrt(keras.ops.sum(keras.ops.square(gradient)))


RULES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "large matrices": lambda g, step, path: normed(g) if len(g.shape) == 2 and min(g.shape) >= 128 else g,
    "many elements": lambda g, step, path: normed(g) if keras.ops.size(g) >= 4096 else g,
    "four dims": lambda g, step, path: normed(g) if len(g.shape) > 3 else g,
    "one dim": lambda g, step, path: normed(g) if len(g.shape) == 1 else g,
    "a name": lambda g, step, path: normed(g) if path.startswith("dense/kernel") else g,
    "from step 6 on": lambda g, step, path: keras.ops.where(step > 5, normed(g), g),
    "every fifth step": lambda g, step, path: keras.ops.where(step % 5 == 0, normed(g), g),
}
"""Each looks at whole gradients, but at those of some variables or of some steps only."""


class Ruled(keras.optimizers.SGD):
    """Plain descent, but for one of `RULES`."""

    def __init__(self, rule: str, **options: Any) -> None:
        super().__init__(**options)
        self.rule = rule

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update by what the rule makes of the gradient."""
        super().update_step(RULES[self.rule](gradient, self.iterations + 1, variable.name), variable, learning_rate)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {**super().get_config(), "rule": self.rule}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_for_some_variables_or_some_steps_is_found(rule: str) -> None:
    assert needs_whole_variables(Ruled(rule), None, FORMS)


def test_a_rule_for_variables_that_the_model_does_not_have_is_no_matter() -> None:
    small = (("dense/kernel", (40, 30)), ("dense/bias", (9,)))
    assert not any(needs_whole_variables(Ruled(rule), None, small) for rule in ("large matrices", "four dims"))


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
    assert needs_whole_variables(optimizer, None, FORMS) is needs_whole
    assert [variable.numpy() for variable in optimizer.variables] == before
    assert not optimizer.built


def test_an_optimizer_that_looks_at_all_variables_at_once_is_refused() -> None:
    with pytest.raises(UsageError, match="ByWholeNorm updates a variable differently when there are others"):
        needs_whole_variables(ByWholeNorm(0.1), None, FORMS)


def test_an_optimizer_that_cannot_be_made_from_its_configuration_is_refused() -> None:
    with pytest.raises(UsageError, match=r"MultiOptimizer could not be tried .*zero:whole=true"):
        needs_whole_variables(optimizers.MultiOptimizer(optimizers.Adam()), None, FORMS)


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
