"""Recomputing blocks of Keras on TensorFlow: same numbers, and the tape keeps less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.plugins.unidist_activations._keras_models import WIDTH, Block, make, make_functional
from unidist.errors import ConfigurationError, UsageError
from unidist.runtime.plugin_manager import PluginManager
from unidist_activations.strategy import Activations

CONTEXT = cast(Any, SimpleNamespace(topology=SimpleNamespace(rank=0), plugins=PluginManager().load()))
FEATURES = np.linspace(-1, 1, 6 * WIDTH).reshape(6, WIDTH)

Step = Callable[[Any, Any], Any]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def recomputed(model: Any, blocks: str | None = None) -> Any:
    return Activations("recompute", blocks=blocks).partition(model, CONTEXT)


def outcome(model: Any, *, in_function: bool = False, steps: int = 2) -> dict[str, Any]:
    """Return gradients of the last step, and all variables, those of seeds included."""

    def step(features: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(features)
            output = model(features, training=True)
            loss = tf.reduce_sum(tf.square(tf.cast(output, "float64")))
        return output, tape.gradient(loss, [features, *model.trainable_variables])

    run = tf.function(step) if in_function else step
    for _ in range(steps):
        output, gradients = run(tf.constant(FEATURES))
    names = ["input", *(f"{item.path} (gradient)" for item in model.trainable_variables)]
    found = dict(zip(names, gradients, strict=True))
    found |= {f"{number} {item.path}": item for number, item in enumerate(model.variables)}
    return {name: tf.convert_to_tensor(value).numpy() for name, value in {**found, "output": output}.items()}


def check_equal(found: dict[str, Any], expected: dict[str, Any], *, limit: float = 1e-12) -> None:
    for (name, value), other in zip(expected.items(), found.values(), strict=True):
        np.testing.assert_allclose(other, value, rtol=limit, atol=limit, err_msg=name)


@pytest.mark.parametrize(("build", "in_function"), [(make, False), (make, True), (make_functional, True)])
def test_gradients_statistics_and_seeds_are_the_same(build: Callable[[], Any], in_function: bool) -> None:
    check_equal(outcome(recomputed(build()), in_function=in_function), outcome(build(), in_function=in_function))


def test_the_comparison_sees_other_random_numbers() -> None:
    """Without this the tests above might pass whatever dropout does."""
    other = make()
    other.blocks[0].rest[1].rate = 0.51
    with pytest.raises(AssertionError):
        check_equal(outcome(other), outcome(make()))


def test_mixed_precision_is_the_same_when_a_block_runs_again() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    check_equal(outcome(recomputed(make()), steps=1), outcome(make(), steps=1), limit=1e-6)


def test_a_block_runs_twice_in_training_and_once_otherwise() -> None:
    runs: list[bool] = []

    class Counting(Block):
        def call(self, x: Any, scale: float = 1.0, training: Any = None) -> Any:
            runs.append(bool(training))
            return super().call(x, scale)

    model = keras.Sequential([keras.Input((WIDTH,)), Counting(WIDTH, 0.5), Counting(WIDTH, 0.5)])
    recomputed(model)
    runs.clear()
    model(FEATURES)
    model(FEATURES, training=False)
    assert runs == [False] * 4
    runs.clear()
    outcome(model, steps=1)
    assert runs == [True] * 4


def test_of_a_block_only_its_input_is_kept() -> None:
    rows = 32

    def kept(model: Any) -> int:
        """Return how many numbers for each row the backward pass takes from the forward pass."""
        num_forward: list[int] = []

        @tf.function
        def step(features: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(features, training=True))
            num_forward.append(len(tf.compat.v1.get_default_graph().get_operations()))
            return tape.gradient(loss, model.trainable_variables)

        graph = step.get_concrete_function(tf.TensorSpec((rows, WIDTH), "float64")).graph
        operations = graph.get_operations()
        forward = {operation.name for operation in operations[: num_forward[-1]]}
        inputs = (tensor for operation in operations[num_forward[-1] :] for tensor in operation.inputs)
        taken = {tensor.name: tensor.shape for tensor in inputs if tensor.op.name in forward}
        return sum(shape[1] for shape in taken.values() if shape.rank == 2 and shape[0] == rows)

    plain, changed = kept(make()), kept(recomputed(make()))
    assert plain >= 3 * (3 * 4 * WIDTH)  # of three runs of a block: what tanh, the norm and dropout give
    assert changed <= 5 * WIDTH  # inputs of the three, input of the head, and the model's


def test_masks_and_integers_reach_the_layers_of_a_block() -> None:
    class Attending(keras.layers.Layer):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.supports_masking = True
            self.attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.2, seed=5)

        def build(self, shape: Any) -> None:
            self.attention.build(shape, shape)

        def call(self, x: Any, positions: Any = None) -> Any:
            x = x + tf.cast(positions, x.dtype)[:, :, None] if positions is not None else x
            return x + self.attention(x, x)

    class Reader(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = keras.layers.Embedding(5, WIDTH, mask_zero=True)
            self.blocks = [Attending() for _ in range(2)]
            self.pool = keras.layers.GlobalAveragePooling1D()  # reads the mask

        def call(self, tokens: Any) -> Any:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, positions=tf.zeros_like(tokens) + tf.range(tokens.shape[1]))
            return self.pool(x)

    def gradients(*, change: bool) -> list[Any]:
        keras.utils.set_random_seed(0)
        model = Reader()
        tokens = tf.constant([[1, 2, 3, 0, 0], [4, 0, 0, 0, 0]])
        model(tokens)
        if change:
            recomputed(model)

        def step() -> list[Any]:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(model(tokens, training=True)))
            return [tf.convert_to_tensor(item) for item in tape.gradient(loss, model.trainable_variables)]

        return list(tf.function(step)())

    for found, expected in zip(gradients(change=True), gradients(change=False), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_a_loss_that_a_block_adds_is_an_error() -> None:
    class Adding(Block):
        def call(self, x: Any, scale: float = 1.0) -> Any:
            self.add_loss(tf.reduce_sum(x))
            return super().call(x, scale)

    model = keras.Sequential([keras.Input((WIDTH,)), Adding(WIDTH, 0.5, name="a"), Adding(WIDTH, 0.5, name="b")])
    with pytest.raises(UsageError, match="layer 'a' adds a loss while it runs"):
        outcome(recomputed(model))


def test_a_second_distribute_replaces_the_first() -> None:
    check_equal(outcome(recomputed(recomputed(make())), steps=1), outcome(make(), steps=1))


def test_weights_keep_their_paths() -> None:
    model = make_functional()
    paths = [item.path for item in model.weights]
    assert [item.path for item in recomputed(model).weights] == paths


def test_blocks_by_pattern() -> None:
    model = recomputed(make(), blocks="block_1+head")
    assert ["call" in vars(layer) for layer in (*model.blocks, model.head)] == [False, True, True]


def test_a_pattern_that_matches_nothing_lists_the_layers() -> None:
    with pytest.raises(ConfigurationError, match=r"'blocks\*' matches no part.*Parts: block_0, block_0/"):
        recomputed(make(), blocks="blocks*")


def test_offload_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"not possible with TensorFlow.*activations=recompute"):
        Activations("offload").partition(make(), CONTEXT)
