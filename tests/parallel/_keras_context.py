"""Trainings in Keras with divided sequences on the ranks of a pool, each beside one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import unidist.keras as ud
from unidist.errors import UnidistError
from unidist.runtime import context
from unidist.settings.environment import set_variables
from unidist_zero import gathered

BATCH, TOKENS, WIDTH, WORDS = 8, 11, 12, 9


@keras.saving.register_keras_serializable("unidist_context")
class Places(layers.Layer):
    """Tokens and positions, as in Keras' examples: the positions are made in the call."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tokens, self.places = layers.Embedding(WORDS, WIDTH), layers.Embedding(TOKENS, WIDTH)

    def call(self, x: Any) -> Any:
        """Return the sum of both."""
        return self.tokens(x) + self.places(ops.arange(0, ops.shape(x)[-1], 1))


@keras.saving.register_keras_serializable("unidist_context")
class Block(layers.Layer):
    """A block, as in Keras' examples."""

    def __init__(self, causal: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attention, self.causal = layers.MultiHeadAttention(6, 4), causal
        self.net = keras.Sequential([layers.Dense(20, activation="relu"), layers.Dense(WIDTH)])
        self.first, self.second = layers.LayerNormalization(), layers.LayerNormalization()

    def build(self, shape: Any) -> None:
        """Make the variables."""
        self.attention.build(shape, shape)
        self.net.build(shape)
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x: Any) -> Any:
        """Take and return (batch, tokens, width)."""
        x = self.first(x + self.attention(x, x, use_causal_mask=self.causal))
        return self.second(x + self.net(x))


def blocks() -> Any:
    """Return a language model of layers made of layers."""
    tokens = keras.Input((TOKENS,), dtype="int32")
    x = Places()(tokens)
    for _ in range(2):
        x = Block()(x)
    return keras.Model(tokens, layers.Dense(WORDS)(x))


def graph() -> Any:
    """Return a graph of layers with padding, grouped queries, a mask, and a mean over tokens in the middle."""
    tokens = keras.Input((TOKENS,), dtype="int32")
    mask = keras.Input((TOKENS, TOKENS), dtype="bool")
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(tokens)
    x = x + layers.MultiHeadAttention(6, 4)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x)
    x = x + layers.GroupQueryAttention(4, 6, 2)(x, x, attention_mask=mask)
    mean = layers.Dense(WIDTH)(layers.GlobalAveragePooling1D(keepdims=True)(x))
    x = layers.Conv1D(WIDTH, 3, padding="same")(x) + mean
    x = layers.RMSNormalization()(layers.Dense(WIDTH, activation="gelu")(x))
    return keras.Model([tokens, mask], layers.Dense(WORDS)(x))


def vectors() -> Any:
    """Return an encoder of vectors, whose last layer pools."""
    return keras.Sequential(
        [
            keras.Input((TOKENS, 5)),
            layers.Dense(WIDTH),
            Block(causal=False),
            layers.GlobalMaxPooling1D(),
            layers.Dense(WORDS),
        ]
    )


def decoder() -> Any:
    """Return a decoder with padding in front, whose queries see no key; windows, and the keys of another sequence."""
    tokens = keras.Input((TOKENS,), dtype="int32")
    memory = keras.Input((TOKENS - 4, 5))
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(tokens)
    x = x + layers.MultiHeadAttention(6, 4, value_dim=5, sliding_window=4)(x, x, use_causal_mask=True)
    x = x + layers.GroupQueryAttention(4, 6, 3, sliding_window=5, use_gate=True)(x, x)
    x = layers.RMSNormalization()(x)
    x = x + layers.MultiHeadAttention(3, 4)(x, layers.Dense(7)(memory))
    x = x + layers.GroupQueryAttention(4, 6, 2)(x, x, use_causal_mask=True)
    return keras.Model([tokens, memory], layers.Dense(WORDS)(x))


MODELS: dict[str, Callable[[], Any]] = {"blocks": blocks, "graph": graph, "vectors": vectors, "decoder": decoder}


def make(name: str) -> Any:
    """Return a model in float64 with fixed values."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    generator = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(generator.normal(size=variable.shape) * 0.3)
    return model


def data(name: str, number: int) -> tuple[Any, Any]:
    """Return inputs and labels of a step."""
    generator = np.random.default_rng(number)
    tokens = generator.integers(1, WORDS, (BATCH, TOKENS)).astype("int32")
    labels = generator.integers(0, WORDS, (BATCH, TOKENS)).astype("int32")
    if name == "vectors":
        return generator.normal(size=(BATCH, TOKENS, 5)), labels[:, 0]
    if name == "graph":
        tokens[::2, -3:] = 0
        mask = np.tril(np.ones((TOKENS, TOKENS), bool))[None] & (generator.random((BATCH, TOKENS, TOKENS)) > 0.2)
        return [tokens, mask | np.eye(TOKENS, dtype=bool)], labels
    if name == "decoder":
        tokens[::2, :3] = 0
        return [tokens, generator.normal(size=(BATCH, TOKENS - 4, 5))], labels
    return tokens, labels


def train(
    name: str, *, distributed: bool, rank: int = 0, size: int = 1, eager: bool = False
) -> tuple[list[float], list[float], Any]:
    """Train by fit; returns losses, accuracies and the model."""
    model = make(name)
    optimizer: Any = keras.optimizers.SGD(0.1, momentum=0.9)
    if distributed:
        model, optimizer = ud.distribute(model, optimizer)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.run_eagerly = eager
    losses, accuracies = [], []
    for number in range(2):
        inputs, labels = data(name, number)
        share = [each[rank::size] for each in inputs] if isinstance(inputs, list) else inputs[rank::size]
        history = model.fit(share, labels[rank::size], batch_size=BATCH // size, epochs=1, shuffle=False, verbose=0)
        losses.append(history.history["loss"][0])
        accuracies.append(history.history["accuracy"][0])
    return losses, accuracies, model


def numbers_of(cases: Sequence[tuple[str, str]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Train each case on the ranks, and in one process on rank 0; returns the numbers of both, {} on other ranks.

    Args:
        cases: the name of a model, with " eagerly" behind it if there is to be no graph; and the strategy.
    """
    found = []
    for case, strategy in cases:
        name, eager = case.removesuffix(" eagerly"), case.endswith(" eagerly")
        with set_variables({"UNIDIST_STRATEGY": strategy}):
            ud.init()
            try:
                current = context.current()
                size, rank = current.axis_size("data"), current.axis_rank("data")
                alone: dict[str, Any] = {}
                if ud.rank() == 0:
                    keras.utils.clear_session()
                    alone = _numbers(name, *train(name, distributed=False), whole=True)
                keras.utils.clear_session()
                trained = train(name, distributed=True, rank=rank, size=size, eager=eager)
                with gathered(trained[-1]) if "zero=3" in strategy else nullcontext():
                    found.append((_numbers(name, *trained, whole=size == 1), alone))
            finally:
                ud.shutdown()
    return found


def _numbers(
    name: str, losses: list[float], accuracies: list[float], model: Any, *, whole: bool
) -> dict[str, np.ndarray[Any, Any]]:
    """Return parameters and outputs, and losses and accuracies if they are those of the whole batch."""
    found = {variable.path: np.asarray(variable) for variable in model.trainable_variables}
    found["outputs"] = np.asarray(model(data(name, 0)[0]))
    return {**found, "losses": np.array(losses), "accuracies": np.array(accuracies)} if whole else found


def kinds() -> dict[str, dict[str, str]]:
    """Return what the layers of each model get."""
    from unidist_context_parallel._keras.kinds import kind_of

    found = {}
    for name in MODELS:
        model = make(name)
        function = model._functional if isinstance(model, keras.Sequential) else model
        found[name] = {
            type(node.operation).__name__: kind_of(node.operation, node).name
            for nodes in function._nodes_by_depth.values()
            for node in nodes
            if not node.is_input
        }
    return found


def refusals() -> dict[str, str]:
    """Return what is raised before the first step."""

    class Subclassed(keras.Model):
        def call(self, x: Any) -> Any:
            return x

    tries: dict[str, tuple[Callable[[], Any], str]] = {
        "heads": (decoder, "context=2:exchange=ulysses"),
        "options": (blocks, "context=2:exchange=gather:dim=1"),
        "subclassed": (Subclassed, "context=2:exchange=gather"),
        "no attention": (
            lambda: keras.Sequential([keras.Input((TOKENS, 5)), layers.LSTM(4), layers.Dense(2)]),
            "context=2:exchange=gather",
        ),
    }
    found = {}
    for name, (build, strategy) in tries.items():
        with set_variables({"UNIDIST_STRATEGY": strategy}):
            ud.init()
            try:
                ud.distribute(build(), keras.optimizers.SGD(0.1))
                found[name] = "nothing was raised"
            except UnidistError as error:
                found[name] = f"{type(error).__name__}: {error}"
            finally:
                ud.shutdown()
    return found
