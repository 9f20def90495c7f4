"""What is counted of a Keras model is what the formulas for its sizes say."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("keras")

import keras
import numpy as np
import tensorflow as tf

from unidist.errors import ConfigurationError
from unidist_planner.memory.source import ScriptModel
from unidist_planner.memory.transformer import Transformer
from unidist_planner.step_time.counted import work_from
from unidist_planner.step_time.transformer import TransformerWork
from unidist_tensorflow.framework import TensorFlowFramework
from unidist_tensorflow.framework.flop_count import count

LAYERS, WIDTH, CODES, TIME, HEADS = 2, 32, 128, 16, 4


class Block(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Attention and an MLP."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first, self.second = keras.layers.LayerNormalization(), keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        self.up, self.down = keras.layers.Dense(4 * WIDTH, activation="gelu"), keras.layers.Dense(WIDTH)

    def build(self, shape: Any) -> None:
        """Give the parts their shapes."""
        for part in (self.first, self.second, self.up):
            part.build(shape)
        self.attention.build(shape, shape)
        self.down.build((*shape[:-1], 4 * WIDTH))
        self.built = True

    def call(self, hidden: Any) -> Any:
        """Return a tensor of the same shape."""
        normal = self.first(hidden)
        hidden = hidden + self.attention(normal, normal, use_causal_mask=True)
        return hidden + self.down(self.up(self.second(hidden)))


def test_a_transformer_is_what_its_sizes_say() -> None:
    codes = keras.Input((TIME,), dtype="int32")
    hidden = keras.layers.Embedding(CODES, WIDTH)(codes)
    for number in range(LAYERS):
        hidden = Block(name=f"block_{number}")(hidden)
    model = keras.Model(codes, keras.layers.Dense(CODES, use_bias=False)(hidden))
    found = work_from(ScriptModel("here", TensorFlowFramework(), model, (np.zeros((2, TIME), np.int32),)), 64)
    expected = TransformerWork(Transformer(LAYERS, WIDTH, CODES, TIME, heads=HEADS), 64).forward(8, 4)
    piece = found.forward(8, 4)
    assert (piece.blocks, piece.outside, piece.border) == (expected.blocks, expected.outside, expected.border)
    assert (found.num_blocks, found.divides) == (LAYERS, {"width": WIDTH, "heads": HEADS})
    assert [layer.path for layer in found.layers()] == ["block_0", "block_1"]
    assert found.layers()[0].parameters == 12 * WIDTH**2 + 13 * WIDTH
    assert found.workload(8).activations is None, "TensorFlow does not show them"


def test_without_blocks_all_layers_with_variables_are_blocks() -> None:
    layers = [keras.layers.Conv2D(4, 3), keras.layers.ReLU(), keras.layers.Conv2D(6, 3), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((8, 8, 3)), *layers, keras.layers.Dense(2)])
    plain = keras.Layer.__call__
    found = count(model, (tf.zeros((5, 8, 8, 3)),))
    convolutions = 2 * 5 * 6 * 6 * 4 * 27, 2 * 5 * 4 * 4 * 6 * 36
    assert [block.flops for block in found.blocks] == [*convolutions, 2 * 5 * 96 * 2]
    assert (found.samples, found.outside, found.heads) == (5, 0, None)
    assert keras.Layer.__call__ is plain, "what is watched is put back"


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (tf.Module(), (tf.zeros((1,)),), "no model of Keras"),
        (keras.Sequential([keras.Input((2,)), keras.layers.ReLU()]), (tf.zeros((3, 2)),), "no layers with variables"),
        (keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]), (7,), "no samples"),
    ],
)
def test_what_cannot_be_counted_is_said(model: Any, inputs: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        count(model, inputs)
