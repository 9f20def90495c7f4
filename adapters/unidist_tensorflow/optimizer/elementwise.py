"""Detection of element-wise Keras optimizers, also while a function is being traced."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from unidist_keras import elementwise


def needs_whole_variables(optimizer: Any, plain: type[Any] | None = None) -> bool:
    """Say whether an optimizer needs each variable as a whole; see `elementwise.needs_whole_variables`.

    Args:
        optimizer: of Keras 3; it is not changed.
        plain: its class before it was bound; default: its class.

    Raises:
        UsageError: it looks at several variables at once, so no part of them can be updated by itself; or it cannot be
            tried.
    """
    with tf.init_scope():
        return elementwise.needs_whole_variables(optimizer, plain)
