"""Keras trainings with cut layers that run on the ranks of a pool; imported there too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import unidist.keras as ud
from unidist.errors import UsageError
from unidist.runtime import context
from unidist.testing import RecordingCommunicator
from unidist.testing.recording import Record
from unidist_tensor_parallel._keras import binding
from unidist_tensor_parallel._keras.layers.axis import TensorAxis
from unidist_tensorflow.training.distributed_optimizer import distribute

STEPS, BATCH, LENGTH, TOKENS, WIDTH = 4, 8, 5, 11, 8
L = keras.layers


@contextmanager
def runtime() -> Iterator[Any]:
    """A fresh runtime around a test's work, with Keras computing in float64."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    ud.init()
    try:
        yield context.current()
    finally:
        ud.shutdown()
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(before)


@keras.saving.register_keras_serializable("unidist_tests")
class Block(L.Layer):  # type: ignore[misc,name-defined]  # Keras has no types
    """A block of a transformer with sizes that do not divide."""

    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.attention = L.MultiHeadAttention(4, 3, dropout=dropout)
        self.first_norm, self.second_norm = L.LayerNormalization(), L.LayerNormalization()
        self.up, self.gate, self.down = L.Dense(14, "gelu"), L.Dense(14), L.Dense(WIDTH)
        self.inner_dropout, self.outer_dropout = L.Dropout(dropout), L.Dropout(dropout)

    def build(self, shape: Any) -> None:
        """Make the variables."""
        self.attention.build(shape, shape)
        for layer in (self.first_norm, self.second_norm, self.up, self.gate):
            layer.build(shape)
        self.down.build((*shape[:-1], 14))
        self.built = True

    def call(self, x: Any, training: Any = None) -> Any:
        """Attend, then think."""
        normed = self.first_norm(x)
        x = x + self.attention(normed, normed, use_causal_mask=True, training=training)
        normed = self.second_norm(x)
        hidden = self.inner_dropout(self.up(normed) * self.gate(normed), training=training)
        return x + self.outer_dropout(self.down(hidden), training=training)


def transformer(seed: int = 5, dropout: float = 0.0, *, blocks: int = 2) -> Any:
    """Tokens to scores of tokens; the same weights wherever it is called with one seed."""
    keras.utils.set_random_seed(seed)
    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    x = L.Embedding(TOKENS, WIDTH, name="embedding")(tokens)
    for number in range(blocks):
        x = Block(dropout, name=f"block{number}")(x)
    return keras.Model(tokens, L.Dense(TOKENS, name="scores")(L.LayerNormalization(name="norm")(x)))


class Mixing(Block):
    """A block that needs all tokens."""

    def call(self, x: Any, training: Any = None) -> Any:
        """Look at their mean."""
        return super().call(x + keras.ops.mean(x, 1, keepdims=True), training=training)


def mixing() -> Any:
    """A model of such blocks."""
    start = keras.Input((LENGTH, WIDTH))
    return keras.Model(start, Mixing()(start))


@keras.saving.register_keras_serializable("unidist_tests")
class Places(L.Layer):  # type: ignore[misc,name-defined]  # Keras has no types
    """Two embeddings, of which one is a vocabulary, and so is cut; their gradients are sparse."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.token, self.place = L.Embedding(TOKENS, WIDTH), L.Embedding(LENGTH + 2, WIDTH)

    def build(self, shape: Any) -> None:
        """Make the variables."""
        self.token.build(shape)
        self.place.build(shape[1:])
        self.built = True

    def call(self, tokens: Any) -> Any:
        """Add what a token is and where it stands."""
        return self.token(tokens) + self.place(keras.ops.arange(tokens.shape[1]))


def positions(seed: int = 5) -> Any:
    """Tokens to scores of tokens; one embedding has the path in Keras that is the other's stable one."""
    keras.utils.set_random_seed(seed)
    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    L.Embedding(1, 1)  # takes a number: the path of the first of `Places` is that of the second among its siblings
    x = Places()(tokens)
    x = x + L.Dense(WIDTH)(L.Dense(14, "gelu")(L.LayerNormalization()(x)))
    return keras.Model(tokens, L.Dense(TOKENS, name="scores")(x))


def dense(seed: int = 5) -> Any:
    """A stack of dense layers on numbers, without an embedding (whose gradients are sparse)."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((WIDTH,)), L.Dense(7, "tanh"), L.Dense(9), L.Activation("relu"), L.Dropout(0.0), L.Dense(TOKENS)]
    )


def shared(seed: int = 5) -> Any:
    """One block with a skip around it, a model of its own, that is used three times."""
    keras.utils.set_random_seed(seed)
    inner = keras.Input((WIDTH,))
    block = keras.Model(inner, inner + L.Dense(WIDTH)(L.Dense(2 * WIDTH, "tanh")(inner)))
    x = inputs = keras.Input((WIDTH,))
    for _ in range(3):
        x = block(x)
    return keras.Model(inputs, L.Dense(TOKENS)(x))


def data(kind: str) -> tuple[Any, Any]:
    """The same batches on every rank."""
    generator = np.random.default_rng(3)
    if kind in ("dense", "shared"):
        return generator.normal(size=(STEPS, BATCH, WIDTH)), generator.integers(TOKENS, size=(STEPS, BATCH))
    tokens = generator.integers(TOKENS, size=(2, STEPS, BATCH, LENGTH))
    return tokens[0], tokens[1]


MODELS: dict[str, Callable[..., Any]] = {
    "transformer": transformer,
    "one block": functools.partial(transformer, blocks=1),  # traced in half the time
    "positions": positions,
    "dense": dense,
    "shared": shared,
}


def without_decay(optimizer: Any) -> Any:
    """Let the biases be as they are."""
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.01),
    "muon": lambda: keras.optimizers.Muon(0.01, weight_decay=0.1),
    "muon for all": lambda: keras.optimizers.Muon(
        0.01, exclude_embeddings=False, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "lamb": lambda: without_decay(keras.optimizers.Lamb(0.01, weight_decay=0.1)),
    "lion": lambda: keras.optimizers.Lion(0.01, weight_decay=0.1),
}


def loss() -> Any:
    """Cross-entropy."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def alone(kind: str, optimizer: str, clip: float | None = None) -> tuple[list[float], Any]:
    """Train one process on the whole batches; returns losses and the model."""
    model, chosen = MODELS[kind](), OPTIMIZERS[optimizer]()
    losses = []
    for x, y in zip(*data(kind), strict=True):
        with tf.GradientTape() as tape:
            value = loss()(y, model(x, training=True))
        losses.append(float(value))
        gradients = tape.gradient(value, model.trainable_variables)
        if clip is not None:
            gradients = [tf.convert_to_tensor(each) for each in gradients]
            norm = tf.linalg.global_norm(gradients)
            gradients = [each * tf.minimum(1.0, clip / (norm + 1e-6)) for each in gradients]
        chosen.apply(gradients, model.trainable_variables)
    return losses, model


def train(kind: str, optimizer: str, strategy: str, *, fit: bool = False) -> tuple[list[float], Any, Any]:
    """Train this rank's part on its share of the batches; returns losses, the model and its optimizer."""
    runtime = context.current()
    model = MODELS[kind]()
    rank, size = runtime.axis_rank, runtime.axis_size
    if fit:
        model, bound = distribute(model, OPTIMIZERS[optimizer](), strategy)
        model.compile(bound, loss(), jit_compile=False)
    else:
        step = ud.TrainStep(model, OPTIMIZERS[optimizer](), loss(), strategy)
        model, bound = step.model, step.optimizer
    losses = []
    for x, y in zip(*data(kind), strict=True):
        x, y = x[rank("data") :: size("data")], y[rank("data") :: size("data")]
        if fit:
            losses.append(model.fit(x, y, batch_size=len(x), verbose=0).history["loss"][0])
        elif "accumulate" in strategy:
            losses.append(sum(float(step(x[part::2], y[part::2])) for part in range(2)) / 2)
        else:
            losses.append(float(step(x, y)))
    return losses, model, bound


def error_of(kind: str, optimizer: str, strategy: str, *, fit: bool = False, clip: float | None = None) -> float:
    """Return how far losses and outputs are from those of one process."""
    with runtime() as current:
        wanted, reference = alone(kind, optimizer, clip)
        losses, model, _ = train(kind, optimizer, strategy, fit=fit)
        x = data(kind)[0][0]
        errors = [np.abs(np.asarray(model(x, training=False)) - np.asarray(reference(x, training=False))).max()]
        if not fit or current.axis_size("data") == 1:
            errors.append(np.abs(np.asarray(losses) - wanted).max())
        return float(max(errors))


def clipped_by_hand(kind: str, strategy: str, *, graph: bool) -> tuple[float, list[float], list[str]]:
    """Train a loop that clips by `tf.clip_by_global_norm`; what is off, the whole norms, and errors of other lists."""
    from tensorflow import clip_by_global_norm  # a name that was taken before anything is cut

    plain = tf.linalg.global_norm

    def trained(model: Any, chosen: Any) -> list[float]:
        def update(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                value = loss()(y, model(x, training=True))
            gradients = tape.gradient(value, model.trainable_variables)
            assert sum(isinstance(each, tf.IndexedSlices) for each in gradients) == (0 if kind == "dense" else 2)
            gradients, norm = clip_by_global_norm(gradients, 0.05)
            chosen.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return norm

        run = tf.function(update, jit_compile=False) if graph else update
        return [float(run(tf.constant(x), tf.constant(y))) for x, y in zip(*data(kind), strict=True)]

    with runtime():
        reference = MODELS[kind]()
        wanted = trained(reference, OPTIMIZERS["sgd"]())
        model, bound = distribute(MODELS[kind](), OPTIMIZERS["sgd"](), strategy)
        norms = trained(model, bound)
        x = data(kind)[0][0]
        errors = [np.abs(np.asarray(model(x, training=False)) - np.asarray(reference(x, training=False))).max()]
        errors.append(np.abs(np.asarray(norms) - wanted).max())
        refused = []
        for some in (model.trainable_variables[:1], model.trainable_variables[::-1]):
            try:
                tf.linalg.global_norm([tf.ones(each.shape) for each in some])
            except UsageError as exc:
                refused.append(str(exc))
        assert float(tf.linalg.global_norm([tf.ones((3, 5, 7))])) == np.float32(105**0.5)  # has nothing to do with it
    assert tf.linalg.global_norm is plain
    return float(max(errors)), norms, refused


@contextmanager
def recording() -> Iterator[list[Record]]:
    """A list of what models that are cut inside of the block exchange."""
    records: list[Record] = []

    class Recorded(TensorAxis):
        def __init__(self, communicator: Any) -> None:
            super().__init__(RecordingCommunicator(communicator, records))

    kept = binding.TensorAxis
    binding.TensorAxis = Recorded  # type: ignore[misc]  # in this block only
    try:
        yield records
    finally:
        binding.TensorAxis = kept  # type: ignore[misc]


def vocabulary(ignored: int | None, fit: bool) -> tuple[float, list[tuple[str, int]]]:
    """Train with a cross-entropy of cut logits; returns how far all is from one process, and what a step exchanged."""
    from unidist_tensor_parallel.keras_losses import VocabularyCrossEntropy

    with runtime() as current, recording() as records:
        entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=ignored)
        reference = transformer(blocks=1)
        reference.compile(OPTIMIZERS["sgd"](), entropy, jit_compile=False)
        model = transformer(blocks=1)
        head = model.get_layer("scores")
        chosen, optimizer = VocabularyCrossEntropy(head, ignore_class=ignored), OPTIMIZERS["sgd"]()
        x, y = data("transformer")[0][0], data("transformer")[1][0]
        assert float(chosen(y, model(x))) == float(entropy(y, model(x))), "of whole logits it is Keras' own"
        strategy = f"tensor={current.topology.world_size}:plan=embedding=vocabulary+scores=column"
        if fit:
            model, optimizer = distribute(model, optimizer, strategy)
            model.compile(optimizer, chosen, jit_compile=False)
            step = model.train_on_batch
        else:
            trained = ud.TrainStep(model, optimizer, chosen, strategy)
            model, step = trained.model, trained
        errors = []
        for x, y in zip(*data("transformer"), strict=True):
            records.clear()
            errors.append(abs(float(step(x, y)) - float(reference.train_on_batch(x, y))))
            if fit:
                model.reset_metrics()
                reference.reset_metrics()
        made = [(record.operation, record.nbytes) for record in records]
        logits, counts = np.asarray(model(x, training=False)), head._cut_spec.counts
        begin = sum(counts[: current.topology.rank])
        wanted = np.asarray(reference(x, training=False))[..., begin : begin + head._cut_spec.own]
        errors.append(np.abs(logits - wanted).max())
        outside = chosen(np.full((1, LENGTH), TOKENS), model(x[:1]))
        assert np.isnan(float(outside)), "a target that is no class"
        return float(max(errors)), made
