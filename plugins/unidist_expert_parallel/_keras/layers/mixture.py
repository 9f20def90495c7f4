"""The mixture-of-experts layer of Keras, on TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from unidist_expert_parallel._keras.layers.axis import ExpertAxis, replicas_in_training
from unidist_expert_parallel._keras.layers.dispatch import dispatch
from unidist_expert_parallel._keras.layers.router import choose, router_losses, within_capacity
from unidist_expert_parallel.layout.arguments import check_arguments
from unidist_expert_parallel.layout.owners import held_experts

_WEIGHTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


@keras.saving.register_keras_serializable("unidist")
class MixtureOfExperts(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Sends each token to the `top_k` of many experts that its router scores highest, and adds up what they return.

    See `unidist_expert_parallel.torch.MixtureOfExperts`, whose arguments and weights it has, but for lists of modules.
    The losses of the router are added to the model's own in training (`add_loss`), so `fit` minimizes them. Needs Keras
    on TensorFlow.

    Args:
        num_experts: of the layer, on all ranks together.
        hidden: width within an expert; default: 4 times that of tokens.
        kind: "swiglu", "gelu" or "relu".
        use_bias: the experts have biases.
        top_k: experts that a token goes to.
        softmax: "before": an expert's weight is its probability among all experts; "after": among the chosen ones.
        normalize: divide the weights of the chosen experts by their sum. Default: if `top_k` is above 1.
        capacity_factor: an expert takes at most so many times its even share of tokens; default: none are dropped.
        balance_coefficient: of the balance loss.
        z_coefficient: of the router z-loss.
        options: of every layer: name, dtype, ...
    """

    def __init__(
        self,
        num_experts: int,
        *,
        hidden: int | None = None,
        kind: str = "swiglu",
        use_bias: bool = False,
        top_k: int = 2,
        softmax: str = "before",
        normalize: bool | None = None,
        capacity_factor: float | None = None,
        balance_coefficient: float = 0.0,
        z_coefficient: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if keras.backend.backend() != "tensorflow":
            raise ValueError(f"MixtureOfExperts is for Keras on TensorFlow, and this is {keras.backend.backend()}")
        check_arguments(num_experts, top_k, kind, softmax, capacity_factor)
        self.num_experts = num_experts
        self.hidden = hidden
        self.kind = kind
        self.use_bias = use_bias
        self.top_k = top_k
        self.softmax = softmax
        self.normalize = top_k > 1 if normalize is None else normalize
        self.capacity_factor = capacity_factor
        self.balance_coefficient = balance_coefficient
        self.z_coefficient = z_coefficient
        self._unidist_axis: ExpertAxis | None = None

    @property
    def has_losses(self) -> bool:
        """Whether it adds losses in training."""
        return self.balance_coefficient != 0.0 or self.z_coefficient != 0.0

    def build(self, input_shape: Any) -> None:
        """Make the weights, those of all experts stacked: `(num_experts, out, in)`."""
        width = input_shape[-1]
        hidden = self.hidden or 4 * width
        self.router = self._weight("router", (self.num_experts, width), width)
        shapes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
        for name, shape in shapes.items():
            used = name != "gate" or self.kind == "swiglu"
            whole = (self.num_experts, *shape)
            setattr(self, name, self._weight(name, whole, shape[1]) if used else None)
            bias = self._weight(f"{name}_bias", whole[:2], shape[1]) if used and self.use_bias else None
            setattr(self, f"{name}_bias", bias)
        self.built = True

    def _weight(self, name: str, shape: tuple[int, ...], fan_in: int) -> Any:
        bound = 1.0 / np.sqrt(fan_in)
        return self.add_weight(name=name, shape=shape, initializer=keras.initializers.RandomUniform(-bound, bound))

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the shape of the inputs."""
        return input_shape

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Take tokens of any shape `(..., width)`, return the same. Collective if the experts are divided."""
        axis = self._unidist_axis
        tokens = tf.reshape(inputs, [-1, inputs.shape[-1]])
        wide = tokens if tokens.dtype == tf.float64 else tf.cast(tokens, tf.float32)
        scores = tf.matmul(wide, tf.cast(self.router, wide.dtype), transpose_b=True)
        probabilities, weights, index = choose(scores, self.top_k, softmax=self.softmax, normalize=self.normalize)
        hot = tf.one_hot(index, self.num_experts, dtype=tf.int64)
        counts = tf.reduce_sum(hot, 0)  # (k, experts)
        has_losses = self.has_losses and training
        if has_losses or self.capacity_factor is not None:
            # Where the experts are whole, a rank may evaluate alone.
            replicas = axis or (replicas_in_training() if training else None)
            everyone = counts[tf.newaxis] if replicas is None else replicas.gathered_counts(counts)
            if has_losses:
                balance, z = router_losses(scores, probabilities, everyone, replicas)
                self.add_loss(self.balance_coefficient * balance + self.z_coefficient * z)
            if self.capacity_factor is not None:
                replica = 0 if replicas is None else replicas.replica
                kept = within_capacity(hot, everyone, replica, self._limit(everyone))
                index = tf.where(kept, index, self.num_experts)
                counts = tf.reduce_sum(hot * tf.cast(kept, tf.int64)[:, :, tf.newaxis], 0)
        found = dispatch(tokens, index, tf.reduce_sum(counts, 0), self._compute, axis)
        mixed = tf.reduce_sum(found * tf.cast(weights, found.dtype)[:, :, tf.newaxis], 1)
        return tf.reshape(mixed, tf.shape(inputs))

    def _limit(self, everyone: tf.Tensor) -> tf.Tensor:
        """Return the capacity, see `layout.capacity`."""
        num_tokens = tf.cast(tf.reduce_sum(everyone[:, 0]), tf.float64)
        share = self.capacity_factor * num_tokens * self.top_k / self.num_experts
        return tf.maximum(tf.cast(tf.math.ceil(share), tf.int64), 1)

    def _compute(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """See `dispatch.Compute`."""
        num_held = int(self.up.shape[0])
        gates, ups, downs, gate_biases, up_biases, down_biases = (
            [None] * num_held if weights is None else tf.unstack(tf.cast(weights, rows.dtype), num_held)
            for weights in (getattr(self, name) for name in _WEIGHTS)
        )
        results = []
        for number, part in enumerate(tf.split(rows, counts, num=num_held)):
            inner = _linear(part, ups[number], up_biases[number])
            if gates[number] is not None:
                inner = tf.nn.silu(_linear(part, gates[number], gate_biases[number])) * inner
            else:
                inner = tf.nn.gelu(inner) if self.kind == "gelu" else tf.nn.relu(inner)
            results.append(_linear(inner, downs[number], down_biases[number]))
        return tf.concat(results, 0)

    def divide(self, axis: ExpertAxis) -> list[Any]:
        """Keep this rank's experts, and find the others along the axis; returns the divided weights.

        For the strategy.
        """
        held = held_experts(self.num_experts, axis.rank, axis.size)
        divided = [weights for weights in (getattr(self, name) for name in _WEIGHTS) if weights is not None]
        for weights in divided:
            part = np.asarray(weights.value)[held.start : held.stop]
            with tf.init_scope():
                weights._shape = tuple(part.shape)
                weights._initialize(tf.constant(part, dtype=weights.value.dtype))
        self._unidist_axis = axis
        return divided

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        names = (
            "num_experts", "hidden", "kind", "use_bias", "top_k", "softmax", "normalize", "capacity_factor",
            "balance_coefficient", "z_coefficient",
        )  # fmt: skip
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


def _linear(rows: tf.Tensor, weight: tf.Tensor, bias: tf.Tensor | None) -> tf.Tensor:
    result = tf.matmul(rows, weight, transpose_b=True)
    return result if bias is None else result + bias
