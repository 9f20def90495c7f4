"""A GPT in Keras, on TensorFlow or JAX, whose batches have rows of padding; its losses are weighted by what counts."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from uneven_keras import COMPILED, computing_in

import unidist.keras as ud
from unidist.settings.environment import set_variables

ROWS, TOKENS, WIDTH, VOCABULARY, STEPS, IGNORED = 8, 6, 8, 11, 2, -1
L = keras.layers


@dataclass(frozen=True)
class Case:
    """A training.

    Args:
        line: of strategies.
        passes: backward passes of an update.
        way: "step" for `TrainStep`, "loop" for `distribute`.
        weighted: with weights; else as it is by default, with a loss that Keras knows nothing of.
    """

    line: str
    passes: int = 1
    way: str = "step"
    weighted: bool = True


def _norm(name: str) -> Any:
    """Return a normalisation, or none: that of Keras on JAX is in float32 inside."""
    return L.Identity(name=name) if COMPILED else L.LayerNormalization(name=name)


def make() -> Any:
    """Return the model, with the same values everywhere."""
    keras.utils.set_random_seed(5)
    tokens = keras.Input((TOKENS,), dtype="int32", name="tokens")
    x = L.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens)
    for number in range(2):
        normed = _norm(name=f"first_norm_{number}")(x)
        attention = L.MultiHeadAttention(4, 2, name=f"attention_{number}")
        if COMPILED:  # the softmax of JAX's own function, which has no scores, is always in float32
            mixed, _ = attention(normed, normed, use_causal_mask=True, return_attention_scores=True)
        else:
            mixed = attention(normed, normed, use_causal_mask=True)
        x = L.Add(name=f"first_add_{number}")([x, mixed])
        normed = _norm(name=f"second_norm_{number}")(x)
        inner = L.Dense(16, "gelu", name=f"up_{number}")(normed)
        x = L.Add(name=f"second_add_{number}")([x, L.Dense(WIDTH, name=f"down_{number}")(inner)])
    return keras.Model(tokens, L.Dense(VOCABULARY, name="scores")(_norm(name="norm")(x)))


def batch(step: int, turn: int) -> tuple[Any, Any]:
    """Return tokens and targets of all ranks: rows have other lengths, and the first half of some passes is padding."""
    generator = np.random.default_rng((7, step, turn))
    tokens, targets = (generator.integers(1, VOCABULARY, (ROWS, TOKENS)).astype("int32") for _ in range(2))
    lengths = generator.integers(1, TOKENS + 1, ROWS)
    if (step + turn) % 2:
        lengths[: ROWS // 2] = 0
    is_padding = np.arange(TOKENS)[None] >= lengths[:, None]
    return np.where(is_padding, 0, tokens), np.where(is_padding, IGNORED, targets)


def loss_of(targets: Any, outputs: Any) -> Any:
    """Return the mean over what counts, by a division that is not guarded."""
    ops = keras.ops
    kept = ops.cast(targets != IGNORED, "float64")
    losses = keras.losses.sparse_categorical_crossentropy(ops.maximum(targets, 0), outputs, from_logits=True)
    return ops.sum(losses * kept) / ops.sum(kept)


def guarded(targets: Any, outputs: Any) -> Any:
    """Return the same, 0 of nothing."""
    ops = keras.ops
    kept = ops.cast(targets != IGNORED, "float64")
    losses = keras.losses.sparse_categorical_crossentropy(ops.maximum(targets, 0), outputs, from_logits=True)
    return ops.sum(losses * kept) / ops.maximum(ops.sum(kept), 1)


def count(targets: Any) -> Any:
    """Return the number of tokens that count."""
    return keras.ops.sum(keras.ops.cast(targets != IGNORED, "int32"))


def optimizer() -> Any:
    """Return an optimizer that is linear: others of Keras square the slices of an embedding's gradient one by one."""
    return keras.optimizers.SGD(0.25, momentum=0.5)


def values(model: Any) -> list[Any]:
    """Return the model's weights."""
    return [np.array(each) for each in model.get_weights()]


def alone(passes: int) -> tuple[list[list[Any]], list[float]]:
    """Train in this process, without unidist, on all batches of an update at once; return weights and losses."""
    model, losses = make(), list[float]()
    model.compile(optimizer(), loss_of, jit_compile=COMPILED)
    for step in range(STEPS):
        batches = [batch(step, turn) for turn in range(passes)]
        for each in batches:
            losses.append(float(model.test_on_batch(*each)))
            model.reset_metrics()
        model.train_on_batch(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))
        model.reset_metrics()
    return values(model), losses


def errors_of(cases: Sequence[Case]) -> list[float | str]:
    """Train each; return the largest difference of a weight or a loss from one process, or the error."""
    references: dict[int, tuple[list[Any], list[float]]] = {}
    found: list[float | str] = []
    with computing_in("float64"):
        for case in cases:
            if case.passes not in references:
                references[case.passes] = alone(case.passes)
                keras.utils.clear_session(free_memory=False)  # names are numbered the same on all ranks
    for case in cases:
        off = {} if case.weighted else {"UNIDIST_VERIFY": "off"}
        try:
            with (
                set_variables({"UNIDIST_STRATEGY": case.line, "UNIDIST_ENGINE": "shm", **off}),
                computing_in("float64"),
            ):
                found.append(_error(case, *references[case.passes]))
        except Exception:
            found.append(traceback.format_exc(limit=-4))
    return found


def _error(case: Case, weights: list[Any], losses: list[float]) -> float:
    step = (_by_step if case.way == "step" else _by_loop)(case)
    found: list[float] = []
    size, rank = ud.data_size(), ud.data_rank()
    mine = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    for number in range(STEPS):
        for turn in range(case.passes):
            tokens, targets = batch(number, turn)
            found.append(float(step(tokens[mine], targets[mine])))
    # What training has made of every weight is seen in outputs, whichever rank has the weights.
    tokens, targets = batch(STEPS, 0)
    plain = make()
    plain.set_weights(weights)
    expected = np.array(plain(tokens, training=False))
    outputs = np.array(step.predict(tokens))
    differences = [*np.abs(np.array(found) - losses), np.abs(outputs - expected).max()]
    return float(np.max(differences))


def _by_step(case: Case) -> Any:
    loss = loss_of if case.weighted else guarded
    return ud.TrainStep(make(), optimizer(), loss, weight=count if case.weighted else None)


class _by_loop:  # noqa: N801 - used as a function
    def __init__(self, case: Case) -> None:
        self._model, self._optimizer = ud.distribute(make(), optimizer())

    def predict(self, tokens: Any) -> Any:
        """Return the outputs."""
        return self._model(tokens, training=False)

    def __call__(self, tokens: Any, targets: Any) -> float:
        """Train on a batch; returns the mean over what counts on all ranks."""
        step = self._on_jax if keras.backend.backend() == "jax" else self._on_tensorflow
        return float(ud.allreduce(step(tokens, targets), name="loss"))

    def _on_tensorflow(self, tokens: Any, targets: Any) -> Any:
        import tensorflow as tf

        model = self._model
        with tf.GradientTape() as tape:
            loss = ud.weighted(guarded(targets, model(tokens, training=True)), count(targets))
        self._optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    def _on_jax(self, tokens: Any, targets: Any) -> Any:
        import jax

        model = self._model
        trainable = [each.value for each in model.trainable_variables]

        def loss_of(trainable: Any) -> Any:
            outputs, _ = model.stateless_call(trainable, [], tokens, training=True)
            return ud.weighted(guarded(targets, outputs), count(targets))

        loss, gradients = jax.jit(jax.value_and_grad(loss_of))(trainable)
        self._optimizer.apply(gradients, model.trainable_variables)
        return loss


def of_nothing(line: str) -> tuple[float, float]:
    """Train on batches in which nothing counts; return the loss, and how far that has changed the outputs."""
    with set_variables({"UNIDIST_STRATEGY": line, "UNIDIST_ENGINE": "shm"}), computing_in("float64"):
        step = ud.TrainStep(make(), keras.optimizers.SGD(1.0), loss_of, weight=count)
        tokens, targets = batch(0, 0)
        before = np.array(step.predict(tokens))
        loss = float(step(tokens, np.full_like(targets, IGNORED)))
        return loss, float(np.abs(np.array(step.predict(tokens)) - before).max())
