"""Trainings in Keras in 16 bits: digits, gradients that vanish, infinities on one rank."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import unidist.keras as ud
from unidist.errors import UsageError
from unidist.settings.environment import set_variables


class Started:
    """A `with` statement from `init` to `shutdown`, with a strategy."""

    def __init__(self, strategy: str) -> None:
        self._variables = set_variables({"UNIDIST_STRATEGY": strategy})

    def __enter__(self) -> None:
        self._variables.__enter__()
        ud.init()
        keras.utils.set_random_seed(0)

    def __exit__(self, *error: Any) -> None:
        ud.shutdown()
        self._variables.__exit__(None, None, None)


def digits(strategy: str, *, built: bool = True) -> dict[str, Any]:
    """Train a small network on digits by `fit`; return its accuracy, types and checksum."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    with Started(strategy):
        layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        model: Any = keras.Sequential([*([keras.layers.Input((64,))] if built else []), *layers])
        model, optimizer = ud.distribute(model, keras.optimizers.SGD(0.1, momentum=0.9))
        model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        mine = slice(ud.rank(), 1400, ud.size())
        model.fit(images[mine], labels[mine], epochs=8, batch_size=50, shuffle=False, verbose=0)
        logits = model(images[1400:])
        scaler = optimizer._unidist._update.scaler
        return {
            "accuracy": float(np.mean(np.argmax(logits, 1) == labels[1400:])),
            "computed": logits.dtype.name,
            "kept": model.weights[0].dtype,
            "skipped": None if scaler is None else scaler.num_skipped,
            "updates": int(optimizer.iterations),
            "sum": float(sum(np.abs(value).sum() for value in model.get_weights())),
        }


def _line(units: int, width: int) -> Any:
    return keras.Sequential(
        [keras.layers.Input((width,)), keras.layers.Dense(units, use_bias=False, kernel_initializer="ones")]
    )


class LateLayers(keras.Model):
    """Makes its layers while it is built, with the model's policy or without."""

    def __init__(self, *, follows: bool) -> None:
        super().__init__()
        self.follows = follows

    def build(self, shape: Any) -> None:
        """Make the layers."""
        self.dense = keras.layers.Dense(3, dtype=self.dtype_policy if self.follows else None, name="late")
        self.dense.build(shape)

    def call(self, inputs: Any) -> Any:
        """Compute."""
        return self.dense(inputs)


def late_layers(*, follows: bool) -> list[str]:
    """Train a model whose layers are made after `distribute`; return the warnings and the type of what it returns."""
    import logging

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.append(record.getMessage())

    warned: list[str] = []
    with Started("precision=bf16"):
        model: Any = LateLayers(follows=follows)
        model, optimizer = ud.distribute(model, keras.optimizers.SGD(0.1))
        handler = Keep(logging.WARNING)
        logging.getLogger("unidist").addHandler(handler)
        try:
            for _ in range(2):
                with tf.GradientTape() as tape:
                    outputs = model(tf.ones((2, 4)))
                    loss = tf.reduce_mean(tf.cast(outputs, tf.float32) ** 2)
                variables = model.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        finally:
            logging.getLogger("unidist").removeHandler(handler)
        return [outputs.dtype.name, *warned]


def small_gradients(strategy: str) -> float:
    """Train where gradients are too small for float16, with a rate to match; return what is left of the loss."""
    with Started(strategy):
        model = _line(1, 2)
        model, optimizer = ud.distribute(model, keras.optimizers.SGD(0.1 * 2.0**30))
        inputs = np.random.default_rng(ud.rank()).standard_normal((16, 2)).astype("float32")
        targets = inputs[:, :1] - inputs[:, 1:]
        losses = []
        for _ in range(20):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.cast(model(inputs), tf.float32) - targets) ** 2)
                scaled = optimizer.scale_loss(loss * 2.0**-30)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
            losses.append(float(loss))
        return losses[-1] / losses[0]


def one_overflow(strategy: str, mode: str, where: int) -> dict[str, Any]:
    """Do four updates, the second with a gradient on rank `where` that is too large for float16."""
    with Started(strategy):
        model = _line(2, 3)
        model, optimizer = ud.distribute(model, keras.optimizers.Adam(0.1))
        update = optimizer._unidist._update
        passes = update.accumulation.passes
        factors = np.ones((4, passes, 2, 1), "float32")
        if ud.rank() == where:
            factors[1] = 1e6
        scales: list[float] = []
        weights: list[Any] = []

        def note(*_: Any, **__: Any) -> None:
            scales.append(update.scaler.scale)
            weights.append(model.get_weights()[0])

        note()
        if mode == "fit":
            model.compile(optimizer, loss=lambda y, y_pred: tf.reduce_mean(y * y_pred))
            callback = keras.callbacks.LambdaCallback(on_train_batch_end=note)
            y = factors.reshape(-1, 1)
            model.fit(np.ones((len(y), 3), "float32"), y, batch_size=2, shuffle=False, verbose=0, callbacks=[callback])
        else:

            def step(factor: Any) -> None:
                with tf.GradientTape() as tape:
                    outputs = tf.cast(model(tf.ones((2, 3))), tf.float32)
                    loss = optimizer.scale_loss(tf.reduce_mean(outputs * factor))
                variables = model.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

            run = tf.function(step) if mode == "function" else step
            for factor in factors.reshape(-1, 2, 1):
                run(tf.constant(factor))
                note()
        scales, weights = scales[::passes], weights[::passes]
        return {
            "scales": scales[1:],
            "changed": [not np.array_equal(a, b) for a, b in itertools.pairwise(weights)],
            "iterations": int(optimizer.iterations),
            "counted": update.step,
            "finite": bool(np.isfinite(weights[-1]).all()),
            "weight": weights[-1].tolist(),
        }


def policies(strategy: str) -> dict[str, str]:
    """Prepare a model with layers of all sorts; return their policies."""
    with Started(strategy):
        model = keras.Sequential(
            [
                keras.layers.Input((4, 8)),
                keras.layers.Dense(8, name="dense"),
                keras.layers.LSTM(8, name="recurrent"),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Dense(3, dtype="float64", name="wide"),
            ]
        )
        model, _ = ud.distribute(model, keras.optimizers.SGD(0.1))
        return {layer.name: layer.dtype_policy.name for layer in model._flatten_layers(include_self=False)}


def error_of(strategy: str, kind: str) -> str:
    """Use the strategy in a way that is refused; return the message."""
    with Started(strategy):
        model = _line(1, 2)
        optimizer: Any = keras.optimizers.SGD(0.1)
        if kind == "mixed":
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            for layer in model._flatten_layers():
                layer.dtype_policy = "mixed_bfloat16"
        if kind == "scaling":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        try:
            if kind == "optimizer":
                ud.DistributedOptimizer(optimizer)
            model, optimizer = ud.distribute(model, optimizer)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.cast(model(np.ones((2, 2), "float32")), tf.float32))
                if kind != "unscaled":
                    loss = optimizer.scale_loss(loss)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        except UsageError as exc:
            return str(exc)
        return ""
