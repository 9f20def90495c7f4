"""Detection of element-wise Keras optimizers, also while a function is being traced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import tensorflow as tf

from unidist.errors import ConfigurationError
from unidist_keras import elementwise

_CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


def needs_whole_variables(optimizer: Any, plain: type[Any] | None, forms: Iterable[tuple[str, Sequence[int]]]) -> bool:
    """Return whether an optimizer needs each variable as a whole; see `elementwise.needs_whole_variables`.

    Args:
        optimizer: of Keras 3; it is not changed.
        plain: its class before it was bound; None: its class.
        forms: paths and shapes of the whole variables that it is for.

    Raises:
        UsageError: it looks at several variables at once, so no part of them can be updated by itself; or it cannot be
            tried.
    """
    with tf.init_scope():
        return elementwise.needs_whole_variables(optimizer, plain, forms)


def counts_occurrences(optimizer: Any, plain: type[Any] | None = None) -> bool:
    """Return whether the occurrences of a row in a sparse gradient count one by one; False: their sum counts.

    Keras' Adam adds up the squares of the occurrences, for example, and its clipping takes the norm of all of them.
    True, too, if the optimizer cannot be tried.

    Args:
        optimizer: of Keras 3; it is not changed.
        plain: its class before it was bound; default: its class.
    """
    if any(getattr(optimizer, option, None) for option in _CLIPPING):
        return True
    with tf.init_scope():
        return elementwise.depends_on_form(optimizer, plain, _in_two)


class RowCheck:
    """Refuses sparse gradients, for a strategy that adds up their rows, if the optimizer takes each by itself.

    Args:
        optimizer: of Keras 3.
        plain: its class before it was bound.
        accepting: the strategy with the option by which a script accepts the sums.
    """

    def __init__(self, optimizer: Any, plain: type[Any], accepting: str) -> None:
        self._optimizer = optimizer
        self._plain = plain
        self._accepting = accepting

    @cached_property
    def allows_sums(self) -> bool:
        """Whether the optimizer makes the same of rows and of their sum."""
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        return not counts_occurrences(inner, self._plain if inner is self._optimizer else type(inner))

    def __call__(self, variable: Any) -> None:
        """Raise ConfigurationError if rows of the gradient of this variable of the model may not be added up."""
        if not self.allows_sums:
            raise ConfigurationError(
                f"the gradient of {str(variable.path)!r} is sparse, and {self._plain.__name__} takes each occurrence "
                "of a row by itself (its square, its norm), but this strategy adds the rows up first: the numbers "
                f"would not be those of one process. Use data, zero=1 or zero=2; or the option {self._accepting}"
            )


def _in_two(gradient: Any) -> tf.IndexedSlices:
    """Return a gradient in which each row occurs twice.

    With opposite signs, so that magnitudes do not add up to that of the sum, and in another ratio in each row: a factor
    that all have in common makes no difference to Lamb.
    """
    values = tf.convert_to_tensor(gradient)
    rows = tf.range(values.shape[0])
    part = values * (0.5 + tf.cast(rows, values.dtype))[:, None]
    return tf.IndexedSlices(
        tf.concat([-part, values + part], 0), tf.concat([rows, rows], 0), tf.constant(tuple(values.shape))
    )
