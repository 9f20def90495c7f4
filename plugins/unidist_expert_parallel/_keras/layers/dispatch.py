"""Tokens to their experts, on whatever rank these are, and back."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from unidist_expert_parallel._keras.layers.axis import ExpertAxis, rows_at

Compute = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""From rows, `(rows, width)`, ordered by this rank's experts, and the number of each, int64, to as many rows."""


def dispatch(
    tokens: tf.Tensor, index: tf.Tensor, counts: tf.Tensor, compute: Compute, axis: ExpertAxis | None
) -> tf.Tensor:
    """Return what the chosen experts make of each token. Collective over the axis, forward and backward.

    Args:
        tokens: `(tokens, width)`; ranks may have different numbers, also none.
        index: `(tokens, k)`, int32: the experts that a token goes to; a number above the last for none.
        counts: `(experts,)`, int64: how many tokens go to each expert.
        compute: of the experts that this rank has.
        axis: whose ranks have the experts; None: this process has all.

    Returns:
        `(tokens, k, width)`: the outputs of a token's experts; zeros for no expert.
    """
    top_k = index.shape[1]
    flat = tf.reshape(index, [-1])
    order = tf.argsort(flat, stable=True)[: tf.cast(tf.reduce_sum(counts), tf.int32)]  # without an expert: last
    rows = rows_at(tokens, order // top_k)
    results = compute(rows, counts) if axis is None else _elsewhere(rows, counts, compute, axis)
    width = tokens.shape[1]
    whole = tf.scatter_nd(order[:, tf.newaxis], results, [tf.shape(flat)[0], width])
    return tf.reshape(whole, [-1, top_k, width])


def _elsewhere(rows: tf.Tensor, counts: tf.Tensor, compute: Compute, axis: ExpertAxis) -> tf.Tensor:
    """Return the results of rows that are ordered by their experts, which the ranks of the axis hold."""
    each = counts.shape[0] // axis.size
    arriving = axis.exchange_counts(counts)  # by rank, then by this rank's experts
    here = axis.exchange(rows, counts, arriving)
    experts = tf.repeat(tf.tile(tf.range(each), [axis.size]), arriving)
    by_expert = tf.argsort(experts, stable=True)
    results = compute(rows_at(here, by_expert), tf.reduce_sum(tf.reshape(arriving, [axis.size, each]), 0))
    return axis.exchange(rows_at(results, tf.math.invert_permutation(by_expert)), arriving, counts)
