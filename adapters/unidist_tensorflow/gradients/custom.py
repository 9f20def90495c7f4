"""Custom gradients of what TensorFlow cannot see into: exchanges among ranks. See `host_node`.

A node of the host has no gradient, and where one is asked for TensorFlow takes it for a constant without a word. So
custom gradients come from here: they have gradients themselves, or say that they have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from unidist.errors import UsageError

Exchange = Callable[..., Sequence[tf.Tensor]]


def pair(forward: Callable[[tf.Tensor], tf.Tensor], transpose: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Return `forward` of one tensor, where each of two linear functions is the gradient of the other, to any order."""
    function = pair_of_groups(lambda tensor: [forward(tensor)], lambda gradient: [transpose(gradient)])
    return lambda tensor: function([tensor])[0]


def pair_of_groups(forward: Exchange, transpose: Exchange) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]:
    """Return the same of functions that take tensors and return a list of tensors."""

    @tf.custom_gradient
    def function(*tensors: tf.Tensor) -> tuple[Sequence[tf.Tensor], Callable[..., Sequence[tf.Tensor]]]:
        return list(forward(*tensors)), lambda *gradients: pair_of_groups(transpose, forward)(gradients)

    return lambda tensors: list(function(*map(tf.convert_to_tensor, tensors)))


def differentiable_once(
    what: str, is_sparse: Callable[[int], None] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return `tf.custom_gradient`, with a UsageError where the gradient is differentiated.

    Args:
        what: has the gradient.
        is_sparse: is called with the number of an output whose gradient is sparse; it is made dense.
    """

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @tf.custom_gradient
        def outer(*tensors: tf.Tensor) -> Any:
            outputs, backward = function(*tensors)

            @tf.custom_gradient
            def gradients(*given: tf.Tensor) -> Any:
                return backward(*given[: len(given) - len(tensors)]), refuse

            # Pass the tensors too, though backward has them already: the gradient depends on them. An embedding lookup
            # gives IndexedSlices, which tf.custom_gradient does not accept.
            def backward_of(*upstream: Any) -> Any:
                for number, gradient in enumerate(upstream):
                    if is_sparse is not None and isinstance(gradient, tf.IndexedSlices):
                        is_sparse(number)
                return gradients(*map(_dense, upstream), *tensors)

            return outputs, backward_of

        def refuse(*_: Any) -> Any:
            raise UsageError(
                f"{what}: a gradient was differentiated, and has no gradient itself: a loss that is computed from it "
                "(a gradient penalty, a Hessian) would train wrongly. Compute it from layers that have one"
            )

        return outer

    return decorated


def _dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
