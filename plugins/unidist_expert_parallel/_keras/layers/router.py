"""The choice of experts: the top k, which assignments exceed the capacity, and the losses of the router."""

from __future__ import annotations

import tensorflow as tf

from unidist_expert_parallel._keras.layers.axis import Replicas


def choose(scores: tf.Tensor, top_k: int, *, softmax: str, normalize: bool) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the probabilities of all experts, and weights and numbers of the chosen ones.

    Args:
        scores: `(tokens, experts)`.
        top_k: number of experts to choose.
        softmax: "before" takes the probabilities of all experts, "after" the softmax of the chosen scores.
        normalize: with "before", divide the weights by their sum.
    """
    probabilities = tf.nn.softmax(scores)
    if softmax == "after":
        chosen, index = tf.math.top_k(scores, top_k)
        return probabilities, tf.nn.softmax(chosen), index
    weights, index = tf.math.top_k(probabilities, top_k)
    if normalize:
        weights = weights / tf.reduce_sum(weights, -1, keepdims=True)
    return probabilities, weights, index


def within_capacity(hot: tf.Tensor, everyone: tf.Tensor, replica: int, limit: tf.Tensor) -> tf.Tensor:
    """Return which assignments are within the capacity of their expert, `(tokens, k)`, bool.

    First choices of all tokens come before second ones, then the tokens of earlier ranks before those of later ones.

    Args:
        hot: `(tokens, k, experts)`, int64: the choices as one-hot vectors.
        everyone: `(replicas, k, experts)`, int64: their sums over tokens, of all ranks.
        replica: this rank's place among them.
        limit: tokens for each expert, int64.
    """
    totals = tf.reduce_sum(everyone, 0)
    before = tf.cumsum(totals, 0, exclusive=True) + tf.reduce_sum(everyone[:replica], 0)
    return tf.reduce_sum((tf.cumsum(hot, 0, exclusive=True) + before) * hot, -1) < limit


def router_losses(
    scores: tf.Tensor, probabilities: tf.Tensor, everyone: tf.Tensor, replicas: Replicas | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return balance loss and z-loss of all ranks' tokens; see `unidist_expert_parallel.torch`. Collective."""
    assigned = tf.reduce_sum(everyone, [0, 1])
    num_tokens = tf.cast(tf.maximum(tf.reduce_sum(everyone[:, 0]), 1), scores.dtype)
    squares = tf.reduce_sum(tf.square(tf.reduce_logsumexp(scores, -1)))
    sums = tf.concat([tf.reduce_sum(probabilities, 0), squares[tf.newaxis]], 0)
    if replicas is not None:
        sums = replicas.total(sums)
    means = sums / num_tokens
    fractions = tf.cast(assigned, scores.dtype) / tf.cast(tf.maximum(tf.reduce_sum(assigned), 1), scores.dtype)
    return assigned.shape[0] * tf.reduce_sum(fractions * means[:-1]), means[-1]
