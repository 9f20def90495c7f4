"""Models in Keras for the tests of the strategy, and what one training of them gives. Imported by ranks too."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import unidist.tensorflow as ud

WIDTH, CLASSES, STEPS, BATCH = 8, 3, 6, 12


class Block(keras.layers.Layer):
    """Everything that a second forward pass could get wrong: dropout, a batch norm, a keyword, a weight of its own."""

    def __init__(self, width: int, dropout: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first = keras.layers.Dense(4 * width, activation="tanh")
        self.rest = [keras.layers.BatchNormalization(), keras.layers.Dropout(dropout, seed=3)]
        self.second = keras.layers.Dense(width)

    def build(self, shape: Any) -> None:
        """Make the weights."""
        self.factor = self.add_weight((shape[-1],), initializer="ones", name="factor")
        self.first.build(shape)
        wide = (*shape[:-1], self.first.units)
        for layer in self.rest:
            layer.build(wide)
        self.second.build(wide)

    def call(self, x: Any, scale: float = 1.0) -> Any:
        """Return `x` and something added to it."""
        y = self.first(x)
        for layer in self.rest:
            y = layer(y)  # whether this is training they know from the call around them
        return x + scale * self.second(y) * self.factor


class Model(keras.Model):
    """Two blocks; the last one is used twice."""

    def __init__(self, width: int = WIDTH, *, dropout: float = 0.5) -> None:
        super().__init__()
        self.blocks = [Block(width, dropout, name=f"block_{i}") for i in range(2)]
        self.head = keras.layers.Dense(CLASSES, name="head")

    def call(self, x: Any) -> Any:
        """Return the logits."""
        for block in (*self.blocks, self.blocks[-1]):
            x = block(x, scale=0.7)
        return self.head(x)


def make(width: int = WIDTH, *, dropout: float = 0.5) -> Model:
    """Return the model, always with the same weights."""
    keras.utils.set_random_seed(0)
    model = Model(width, dropout=dropout)
    model(np.zeros((1, width)))
    return model


def make_functional(width: int = WIDTH) -> Any:
    """Return a model of the functional interface."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((width,))
    for i in range(2):
        x = Block(width, 0.5, name=f"block_{i}")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(x))


def data() -> tuple[Any, Any]:
    """Return features and labels of all steps and ranks."""
    rng = np.random.default_rng(3)
    return rng.standard_normal((STEPS * BATCH, WIDTH)), rng.integers(0, CLASSES, STEPS * BATCH)


def train_on_rank(strategy: str, mode: str, *, passes: int, exact: bool) -> dict[str, Any]:
    """Train on this rank's samples with a strategy, from `init` to `shutdown`; see `train`."""
    ud.init()
    try:
        return train(strategy, mode, passes=passes, exact=exact, rank=ud.rank(), size=ud.size())
    finally:
        ud.shutdown()


def train(strategy: str | None, mode: str, *, passes: int, exact: bool, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """Return the weights after training.

    Args:
        strategy: for `distribute`; None: without unidist.
        mode: "eager", "function" or "fit".
        passes: calls of `apply` that make one update.
        exact: no dropout, and batch norms use their statistics: the number of ranks makes no difference.
        rank: whose samples.
        size: number of ranks.
    """
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        model: Any = make(dropout=0.0 if exact else 0.5)
        optimizer: Any = keras.optimizers.SGD(0.05, momentum=0.9)
        for block in model.blocks:
            block.rest[0].trainable = not exact
        if strategy is not None:
            model, optimizer = ud.distribute(model, optimizer, strategy)
        features, labels = data()
        each = BATCH // (size * passes)
        starts = [step * BATCH + (part * size + rank) * each for step in range(STEPS) for part in range(passes)]
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if mode == "fit":
            model.compile(optimizer, loss, jit_compile=False)
            samples = np.concatenate([np.arange(start, start + each) for start in starts])
            model.fit(features[samples], labels[samples], batch_size=each, shuffle=False, verbose=0)
        else:
            step = _step(model, optimizer, loss)
            run = tf.function(step) if mode == "function" else step
            for start in starts:
                run(tf.constant(features[start : start + each]), tf.constant(labels[start : start + each]))
        return {f"{number} {item.name}": np.array(item.numpy()) for number, item in enumerate(model.weights)}
    finally:
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(before)


def _step(model: Any, optimizer: Any, loss: Any) -> Any:
    def step(features: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(labels, model(features, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(value, model.trainable_variables), model.trainable_variables, strict=True)
        )

    return step
