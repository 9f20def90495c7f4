"""One transformer in Keras, trained under any strategy line and in one process, for ranks of a pool."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from _keras_tensor import runtime

import unidist.keras as ud
from unidist.settings.environment import set_variables

BATCH, LENGTH, VOCABULARY, WIDTH, STEPS = 16, 8, 12, 8, 4
CLIP = 0.05
L = keras.layers


@keras.saving.register_keras_serializable("unidist_tests")
class EvenBlock(L.Layer):  # type: ignore[misc,name-defined]  # Keras has no types
    """A block of a transformer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.attention = L.MultiHeadAttention(4, 2)
        self.first_norm, self.second_norm = L.LayerNormalization(), L.LayerNormalization()
        self.up, self.down = L.Dense(16, "gelu"), L.Dense(WIDTH)

    def build(self, shape: Any) -> None:
        """Make the variables."""
        self.attention.build(shape, shape)
        for layer in (self.first_norm, self.second_norm, self.up):
            layer.build(shape)
        self.down.build((*shape[:-1], 16))
        self.built = True

    def call(self, x: Any, training: Any = None) -> Any:
        """Attend, then think."""
        normed = self.first_norm(x)
        x = x + self.attention(normed, normed, use_causal_mask=True, training=training)
        return x + self.down(self.up(self.second_norm(x)))


def make(*, in_blocks: bool) -> Any:
    """Return a transformer: of blocks, or of plain layers (an attention is then the only layer made of layers)."""
    keras.utils.set_random_seed(5)
    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    x = L.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens)
    for number in range(4):
        x = EvenBlock(name=f"block_{number}")(x) if in_blocks else _plain_block(x, number)
    return keras.Model(tokens, L.Dense(VOCABULARY, name="scores")(L.LayerNormalization(name="norm")(x)))


def _plain_block(x: Any, number: int) -> Any:
    normed = L.LayerNormalization(name=f"first_norm_{number}")(x)
    mixed = L.MultiHeadAttention(4, 2, name=f"attention_{number}")(normed, normed, use_causal_mask=True)
    x = L.Add(name=f"first_add_{number}")([x, mixed])
    normed = L.LayerNormalization(name=f"second_norm_{number}")(x)
    inner = L.Dense(16, "gelu", name=f"up_{number}")(normed)
    return L.Add(name=f"second_add_{number}")([x, L.Dense(WIDTH, name=f"down_{number}")(inner)])


def batch(step: int, turn: int) -> tuple[Any, Any]:
    """Return tokens and targets of all ranks."""
    generator = np.random.default_rng((5, step, turn))
    return generator.integers(VOCABULARY, size=(BATCH, LENGTH)), generator.integers(VOCABULARY, size=(BATCH, LENGTH))


def loss() -> Any:
    """Return the loss: the mean over all tokens."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def optimizer() -> Any:
    """Return an optimizer that is linear: others of Keras square the slices of an embedding's gradient one by one."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


def alone(passes: int, *, clips: bool, in_blocks: bool) -> list[float]:
    """Train in this process, without unidist; return the losses."""
    model, chosen = make(in_blocks=in_blocks), optimizer()
    losses = []
    for step in range(STEPS):
        total: list[Any] = []
        summed: list[Any] = []
        for turn in range(passes):
            tokens, targets = batch(step, turn)
            with tf.GradientTape() as tape:
                value = loss()(targets, model(tokens, training=True)) / passes
            gradients = [tf.convert_to_tensor(each) for each in tape.gradient(value, model.trainable_variables)]
            summed = [a + b for a, b in zip(summed, gradients, strict=True)] if summed else gradients
            total.append(float(value))
        if clips:
            norm = tf.linalg.global_norm(summed)
            summed = [each * tf.minimum(1.0, CLIP / (norm + 1e-6)) for each in summed]
        chosen.apply(summed, model.trainable_variables)
        losses.append(sum(total))
    return losses


def errors_of(lines: Sequence[str]) -> dict[str, float | str]:
    """Train under each strategy line; return the largest difference of a loss from one process, or the error.

    The loss of a step shows what the steps before it have made of every parameter.
    """
    references: dict[tuple[int, bool, bool], list[float]] = {}
    found: dict[str, float | str] = {}
    for line in lines:
        passes, clips = 2 if "accumulate=2" in line else 1, "clip_norm" in line
        in_blocks = "sequence=true" in line  # which is along whole blocks
        try:
            with set_variables({"UNIDIST_STRATEGY": line, "UNIDIST_ENGINE": "shm"}), runtime():
                if (passes, clips, in_blocks) not in references:
                    references[passes, clips, in_blocks] = alone(passes, clips=clips, in_blocks=in_blocks)
                    keras.utils.clear_session(free_memory=False)  # names are numbered the same on all ranks
                differences = np.array(_losses(passes, in_blocks)) - references[passes, clips, in_blocks]
                found[line] = float(np.abs(differences).max())
        except Exception:
            found[line] = traceback.format_exc(limit=-4)
        gc.collect()
    return found


def _losses(passes: int, in_blocks: bool) -> list[float]:
    train = ud.TrainStep(make(in_blocks=in_blocks), optimizer(), loss())
    each = BATCH // ud.data_size()
    mine = slice(ud.data_rank() * each, (ud.data_rank() + 1) * each)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for turn in range(passes):
            tokens, targets = batch(step, turn)
            total += float(train(tokens[mine], targets[mine])) / passes
        losses.append(total)
    return losses
