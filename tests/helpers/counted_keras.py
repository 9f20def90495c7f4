"""Trainings in Keras whose losses are divided by what counts in a batch (masks, `ignore_class`, sample weights)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from uneven_keras import COMPILED, PlainStepMixin, computing_in, optimizer, values

import unidist.keras as ud

TOKENS, WORDS, CLASSES = 6, 9, 3
ROWS = ((5, 5, 2), (2, 2, 1))
"""Of each rank, the samples of its batches."""

IGNORED = -1
KINDS = {
    "mask_zero": {"masks": True},
    "ignore_class": {"ignore_class": IGNORED},
    "mask_zero and ignore_class": {"masks": True, "ignore_class": IGNORED},
    "weights": {"reduction": "mean_with_sample_weight"},
    "weights and mask_zero": {"masks": True, "reduction": "mean_with_sample_weight"},
    "two outputs and mask_zero": {"masks": True, "outputs": 2},
}
CASES = [
    *(("fit", kind) for kind in KINDS),
    *(("own train_step", kind) for kind in ("mask_zero and ignore_class", "weights and mask_zero")),
    *((way, "mask_zero and ignore_class") for way in ("TrainStep", "zero=1", "loop")),
]
"""How it is trained, and what counts."""

Batch = tuple[Any, Any, Any]


def network(kind: str, base: Any = keras.Model) -> Any:
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    words = keras.Input((TOKENS,), dtype="int32")
    x = keras.layers.Embedding(WORDS, 5, mask_zero=KINDS[kind].get("masks", False))(words)
    x = dense(6, "tanh", kernel_regularizer=keras.regularizers.L2(1 / 64))(x)
    outputs = [dense(CLASSES)(x) for _ in range(KINDS[kind].get("outputs", 1))]
    return base(words, outputs if len(outputs) > 1 else outputs[0])


def loss(kind: str) -> Any:
    options = {name: KINDS[kind][name] for name in ("ignore_class", "reduction") if name in KINDS[kind]}
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def batches(kind: str, rank: int) -> list[Batch]:
    """Return words, labels and weights of the tokens of each batch; of rank 1 few count."""
    generator = np.random.default_rng(rank)
    found = []
    for rows in ROWS[rank]:
        shape = rows, TOKENS
        counts = generator.uniform(size=shape) < (0.3 if rank else 0.9)
        words = np.where(counts, generator.integers(1, WORDS, size=shape), 0)
        ignored = generator.uniform(size=shape) < (0.6 if rank else 0.1)
        labels = generator.integers(CLASSES, size=shape)
        labels = np.where(ignored, IGNORED, labels) if "ignore_class" in kind else labels
        found.append((words, labels, generator.uniform(0.1, 1 if rank else 3, size=shape)))
    return found


def fitted(kind: str, batch: Batch) -> tuple[Any, ...]:
    """Return a batch as `fit` takes it."""
    words, labels, weights = batch
    targets = (labels, labels) if kind.startswith("two") else labels
    return words, targets, *([weights] if kind.startswith("weights") else [])


def concatenated(parts: Any) -> Batch:
    words, labels, weights = (np.concatenate(each) for each in zip(*parts, strict=True))
    return words, labels, weights


def alone(kind: str) -> tuple[list[float], list[Any]]:
    """Train on the batches of all ranks together, without unidist; returns losses and weights."""
    model, losses = network(kind), []
    model.compile(optimizer(), loss(kind), jit_compile=COMPILED)
    for parts in zip(*(batches(kind, rank) for rank in range(2)), strict=True):
        found = model.train_on_batch(*fitted(kind, concatenated(parts)))
        losses.append(float(found[0] if isinstance(found, list) else found))
        model.reset_metrics()
    return losses, values(model)


def _by_fit(model: Any, kind: str) -> None:
    model, bound = ud.distribute(model, optimizer())
    model.compile(bound, loss(kind), jit_compile=COMPILED)
    model.fit((fitted(kind, batch) for batch in batches(kind, ud.rank())), epochs=1, verbose=0)


def _by_steps(model: Any, kind: str, strategy: str = "data") -> list[float]:
    step = ud.TrainStep(model, optimizer(), loss(kind), strategy)
    words, labels, _ = batches(kind, ud.rank())[0]
    plain = network(kind)
    plain.compile(None, loss(kind), jit_compile=COMPILED)
    whole = concatenated(batches(kind, rank)[0] for rank in range(2))
    np.testing.assert_allclose(float(step.evaluate(words, labels)), plain.test_on_batch(*whole[:2]), rtol=1e-12)
    return [float(step(words, labels)) for words, labels, _ in batches(kind, ud.rank())]


def _counted(kind: str, batch: Batch) -> float:
    words, labels, _ = batch
    return float(np.sum((words != 0) & (labels != IGNORED)))


def _by_loop(model: Any, kind: str) -> None:
    """As docs/data.md says: the loop multiplies the loss by a weight."""
    model, bound = ud.distribute(model, optimizer())
    compute = loss(kind)
    for batch in batches(kind, ud.rank()):
        own = np.array(_counted(kind, batch))
        weight = own * ud.size() / float(ud.allreduce(own, op=ud.Sum, name="what counts"))
        (_on_jax if keras.backend.backend() == "jax" else _on_tensorflow)(model, bound, compute, batch, weight)


def _on_tensorflow(model: Any, bound: Any, compute: Any, batch: Batch, weight: float) -> None:
    import tensorflow as tf

    words, labels, _ = batch
    with tf.GradientTape() as tape:
        value = compute(labels, model(words, training=True)) * weight + sum(model.losses)
    bound.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)


def _on_jax(model: Any, bound: Any, compute: Any, batch: Batch, weight: float) -> None:
    import jax

    words, labels, _ = batch
    trainable = [each.value for each in model.trainable_variables]

    def loss_of(trainable: Any) -> Any:
        outputs, _, losses = model.stateless_call(trainable, [], words, training=True, return_losses=True)
        return compute(labels, outputs) * weight + sum(losses)

    bound.apply(jax.jit(jax.grad(loss_of))(trainable), model.trainable_variables)


WAYS = {
    "fit": _by_fit,
    "own train_step": _by_fit,
    "TrainStep": _by_steps,
    "zero=1": lambda model, kind: _by_steps(model, kind, "zero=1"),
    "loop": _by_loop,
}


class OwnStep(PlainStepMixin, keras.Model):
    """A functional model of that kind."""


def on_rank(way: str, kind: str) -> None:
    """Check that two ranks have the numbers of one process."""
    with computing_in("float64"):
        wanted, weights = alone(kind)
        base = OwnStep if way == "own train_step" else keras.Model
        model = network(kind, base)
        losses = WAYS[way](model, kind)
        if losses is not None:
            np.testing.assert_allclose(losses, wanted, rtol=1e-12)
        exact = 1e-6 if COMPILED and way == "own train_step" else 1e-12  # see `uneven_keras`
        for one, other in zip(values(model), weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=exact, atol=exact / 10, err_msg=f"{way}, {kind}")
