"""Gradients of gradients in Keras on TensorFlow on the ranks of a pool, each training beside one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from _keras_tensor import Block, runtime

import unidist.keras as ud
from unidist_expert_parallel.keras import MixtureOfExperts
from unidist_tensorflow.training.distributed_optimizer import distribute

STEPS, BATCH, TOKENS, WIDTH = 3, 8, 4, 8
L = keras.layers


def made(kind: str) -> Any:
    """Return a critic, the same on every rank."""
    keras.utils.set_random_seed(5)
    start = keras.Input((TOKENS, WIDTH))
    x = L.Dense(10, "tanh")(start)
    if kind == "block":
        x = Block()(L.Dense(WIDTH)(x))
    if kind == "experts":
        x = MixtureOfExperts(4, hidden=12)(L.Dense(WIDTH)(x))
    if kind == "batch norm":
        x = ud.SyncBatchNormalization()(x)
    return keras.Model(start, L.Dense(3)(L.Dense(12, "tanh")(x)))


def penalised(model: Any, optimizer: Any, x: Any) -> Any:
    """Train on a loss with a gradient penalty (Gulrajani et al. 2017), a mean over the samples, and return it."""
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            outputs = model(x, training=True)
            squares = tf.reduce_sum(outputs**2)
        gradient = tf.reshape(inner.gradient(squares, x), [len(x), -1])
        loss = tf.reduce_mean(outputs) + tf.reduce_mean((tf.norm(gradient, axis=1) - 1.0) ** 2)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(outer.gradient(loss, variables), variables, strict=True))
    return loss


def errors_of(cases: Sequence[tuple[str, str, bool]]) -> list[float | str]:
    """Return of each case how far the outputs are from those of one process, or what was raised.

    Args:
        cases: model, strategy, and whether a `tf.function` trains.
    """
    found: list[float | str] = []
    batches = np.random.default_rng(3).normal(size=(STEPS, BATCH, TOKENS, WIDTH))
    for kind, strategy, graph in cases:
        with runtime() as current:
            reference, plain = made(kind), keras.optimizers.SGD(0.001, momentum=0.9)
            for x in batches:
                penalised(reference, plain, tf.constant(x))
            try:
                model, optimizer = distribute(made(kind), keras.optimizers.SGD(0.001, momentum=0.9), strategy)
                step = tf.function(penalised, jit_compile=False) if graph else penalised
                rank, size = current.axis_rank("data"), current.axis_size("data")
                for x in batches:
                    step(model, optimizer, tf.constant(x[rank::size]))
                outputs = [np.asarray(each(batches[0], training=False)) for each in (model, reference)]
                found.append(float(np.abs(outputs[0] - outputs[1]).max()))
            except Exception as exc:
                found.append(f"{type(exc).__name__}: {exc}")
    return found
