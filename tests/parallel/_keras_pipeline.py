"""Trainings of Keras models that are pipelines, on the ranks of a pool, each beside one process."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import unidist.keras
import unidist.tensorflow as ud
from unidist.checkpoint.format.interface import placements_of
from unidist.errors import UsageError
from unidist.runtime import context
from unidist.settings.environment import set_variables
from unidist.testing._training import largest_error
from unidist_keras.checkpoint import stable_paths
from unidist_pipeline._keras.tied import TiedVariables
from unidist_tensorflow.memory import dtype_of
from unidist_tensorflow.training.conformance import computing_in_float64

BATCH = 10  # 4 micro-batches are of 3, 3, 2 and 2 samples
WORDS = 12
Found = dict[str, float]


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        strategy: the strategy line.
        model: name of `MODELS`.
        optimizer: name of `OPTIMIZERS`.
        mode: "step" or "fit".
        steps: calls of a step.
        passes: calls that make one update.
        options: more arguments of the optimizer, for one process only: what a strategy does otherwise.
        first: the step with which it begins; those before were done by who saved what it loads.
        loads: a checkpoint, or "".
        saves: likewise.
        unties: leave out the sum of gradients over the stages.
    """

    strategy: str
    model: str = "skips"
    optimizer: str = "sgd"
    mode: str = "step"
    steps: int = 3
    passes: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    loads: str = ""
    saves: str = ""
    unties: bool = False


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda **options: keras.optimizers.SGD(0.1, momentum=0.9, **options),
    # The usual epsilon would make much of differences by rounding, where a gradient is almost zero.
    "adamw": lambda **options: keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3, **options),
}


def _skips() -> Any:
    """Two inputs, two outputs, a skip connection over everything, a layer that is called twice, penalties."""
    features, more = keras.Input((7,), name="features"), keras.Input((3,), name="more")
    first = layers.Dense(6, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.05))(features)
    twice = layers.Dense(6, activation="tanh", activity_regularizer=keras.regularizers.L2(0.1))
    x = twice(twice(first))
    x = layers.LayerNormalization()(x + layers.Dense(6)(more))
    for _ in range(3):
        x = x + layers.Dense(6, activation="tanh")(x)
    x = layers.Concatenate()([x, first, more])
    x = layers.Dense(5, activation="tanh")(x)
    return keras.Model(
        [features, more], {"label": layers.Dense(4, name="label")(x), "size": layers.Dense(1)(first + 1)}
    )


def _within() -> Any:
    """A Sequential model with models in it."""
    inner = keras.Sequential([layers.Dense(5, activation="tanh") for _ in range(3)])
    start = keras.Input((6,))
    wide = keras.Model(start, layers.Dense(5, activation="tanh")(layers.Dense(9, activation="tanh")(start)))
    model = keras.Sequential([layers.Dense(6, activation="tanh"), wide, inner, layers.Dense(4)])
    model.build((None, 7))
    return model


def _tied() -> Any:
    """The embedding is also the head; regularised, in stages far apart."""
    words = keras.Input((5,), dtype="int32")
    embedding = layers.ReversibleEmbedding(WORDS, 6, embeddings_regularizer=keras.regularizers.L2(0.01))
    x = embedding(words)
    for _ in range(2):
        x = x + layers.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True)
        x = x + layers.Dense(6)(layers.Dense(11, activation="gelu")(x))
    return keras.Model(words, embedding(x, reverse=True))


class Subclassed(keras.Model):
    """A model whose call must be followed; a variable of its own, one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(6, activation="tanh")
        self.blocks = [layers.Dense(6, activation="tanh", name=f"block_{number}") for number in range(4)]
        self.norm = layers.BatchNormalization(name="norm")
        self.head = self.add_weight((6, 4), initializer="glorot_uniform", name="head")
        self.unused = self.add_weight((2,), name="unused")

    def build(self, shape: Any) -> None:
        """Build the layers."""
        self.first.build(shape)
        for each in (*self.blocks, self.norm):
            each.build((None, 6))
        super().build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        """Return logits."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        if not training:
            x = x * 1.0
        return ops.matmul(self.norm(x, training=False), self.head)


def _subclassed() -> Any:
    model = Subclassed()
    model.build((None, 7))
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "skips": _skips,
    "within": _within,
    "tied": _tied,
    "subclassed": _subclassed,
}


def make(case: Case) -> Any:
    """Return the whole model, the same on every rank."""
    keras.utils.set_random_seed(5)
    return MODELS[case.model]()


def loss_of(case: Case) -> Any:
    """Return the loss function."""
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if case.model != "skips":
        return entropy
    return lambda targets, outputs: (
        entropy(targets["label"], outputs["label"]) + ops.mean(ops.square(targets["size"] - outputs["size"]))
    )


def data(case: Case, steps: int) -> list[tuple[Any, Any]]:
    """Return batches of all ranks together."""
    generator = np.random.default_rng(11)
    batches = []
    for _ in range(steps):
        if case.model == "tied":
            codes = generator.integers(0, WORDS, (BATCH, 6)).astype("int32")
            batches.append((codes[:, :-1], codes[:, 1:]))
            continue
        features, labels = generator.standard_normal((BATCH, 7)), generator.integers(0, 4, BATCH)
        if case.model == "skips":
            more, size = generator.standard_normal((BATCH, 3)), generator.standard_normal((BATCH, 1))
            batches.append(([features, more], {"label": labels, "size": size}))
        else:
            batches.append((features, labels))
    return batches


def train(case: Case, batches: Sequence[tuple[Any, Any]], whole: Any) -> dict[str, Any]:
    """Train, evaluate and predict in the way of the case, spread over the ranks; returns numbers by name.

    Args:
        case: which.
        batches: this rank's shares.
        whole: inputs, to predict for.
    """
    model, optimizer = make(case), OPTIMIZERS[case.optimizer]()
    if case.mode == "fit":
        model, optimizer = ud.distribute(model, optimizer)
        return _fit(case, model, optimizer, batches, whole) | weights(model)
    step = ud.TrainStep(model, optimizer, loss_of(case))
    if case.loads:
        ud.load(case.loads, step.model, step.optimizer)
    losses = np.array([float(step(*batch)) for batch in batches[case.first :]])
    if case.saves:
        ud.save(case.saves, step.model, step.optimizer)
    found: dict[str, Any] = {"losses": losses.reshape(-1, case.passes).mean(1)}
    found["evaluated"] = float(step.evaluate(*batches[0]))
    return found | _listed(step.predict(whole)) | weights(step.model)


def alone(case: Case) -> dict[str, Any]:
    """Return what Keras alone comes to, on the batches of a window concatenated."""
    batches = data(case, case.steps * case.passes)
    windows = [batches[first : first + case.passes] for first in range(0, len(batches), case.passes)]
    windows = [keras.tree.map_structure(lambda *parts: np.concatenate(parts), *window) for window in windows]
    model, optimizer = make(case), OPTIMIZERS[case.optimizer](**case.options)
    if case.mode == "fit":
        return _fit(case, model, optimizer, windows, batches[0][0]) | weights(model)
    loss_fn = loss_of(case)

    def loss(batch: Any, training: bool) -> Any:
        return ops.mean(loss_fn(batch[1], model(batch[0], training=training))) + sum(model.losses)

    losses = []
    for batch in windows:
        with tf.GradientTape() as tape:
            losses.append(loss(batch, training=True))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(losses[-1], variables), variables)
    found: dict[str, Any] = {
        "losses": np.array(losses[case.first :]),
        "evaluated": float(loss(batches[0], training=False)),
    }
    return found | _listed(model(batches[0][0], training=False)) | weights(model)


def _fit(case: Case, model: Any, optimizer: Any, batches: Sequence[tuple[Any, Any]], whole: Any) -> dict[str, Any]:
    if case.model == "skips":
        entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, {"label": entropy, "size": "mse"}, metrics={"label": ["accuracy"], "size": ["mae"]})
    else:
        model.compile(optimizer, loss_of(case), metrics=["accuracy"], jit_compile=False)
    features, targets = keras.tree.map_structure(lambda *parts: np.concatenate(parts), *batches)
    size = keras.tree.flatten(batches[0])[0].shape[0]
    history = model.fit(
        features,
        targets,
        sample_weight=np.linspace(0.5, 1.5, len(batches) * size) if case.model == "within" else None,
        batch_size=size,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=batches[0],
    ).history
    found: dict[str, Any] = {f"history {name}": np.array(values) for name, values in history.items()}
    found["evaluated"] = np.array(model.evaluate(*batches[1], verbose=0, return_dict=False))
    found["on batch"] = np.array(model.train_on_batch(*batches[0]))
    return found | _listed(model.predict(whole, batch_size=4, verbose=0))


def _listed(outputs: Any) -> dict[str, Any]:
    return {f"output {place}": np.array(each) for place, each in enumerate(keras.tree.flatten(outputs))}


def weights(model: Any) -> dict[str, Any]:
    """Return copies of this rank's weights, by their names in the whole model; without those that are cut as well."""
    places, found = placements_of(model), {}
    for path, variable in stable_paths(model.weights).items():
        shape = tuple(variable.shape)
        placement = places.placement(path, shape, dtype_of(variable))
        if placement.shape == shape:
            found[f"weight {placement.name}"] = np.array(variable.numpy())
    return found


def share(batches: Sequence[tuple[Any, Any]], number: int, count: int) -> list[Any]:
    """Return the share of each batch of one of `count` places on the data axis."""
    each = BATCH // count
    return [keras.tree.map_structure(lambda part: part[number * each : (number + 1) * each], b) for b in batches]


@contextmanager
def running(strategy: str, engine: str = "auto") -> Iterator[None]:
    """Run unidist."""
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": engine}):
        ud.init()
        try:
            yield
        finally:
            ud.shutdown()
            gc.collect()


def run_cases(cases: Sequence[Case], engine: str = "auto") -> list[dict[str, float]]:
    """Return for each case the largest error of each number that this rank has, beside one process."""
    return [_beside_one_process(case, engine) for case in cases]


def _beside_one_process(case: Case, engine: str) -> dict[str, float]:
    with computing_in_float64(), mock.patch.object(TiedVariables, "add_up", _add_nothing if case.unties else _ADD_UP):
        expected = alone(case) if os.environ.get("UNIDIST_RANK", "0") == "0" else None  # under mpirun: every rank
        keras.utils.clear_session(free_memory=False)  # names are numbered alike on all ranks
        verify = "off" if case.unties else "first"  # which would notice
        with set_variables({"UNIDIST_VERIFY": verify}), running(case.strategy, engine):
            runtime = context.current()
            expected = ud.broadcast_object(expected, 0)
            batches = data(case, case.steps * case.passes)
            mine = share(batches, runtime.axis_rank("data"), runtime.axis_size("data"))
            found = train(case, mine, batches[0][0])
    assert any(name.startswith("weight ") for name in found), "this rank holds nothing"
    return {name: largest_error(np.asarray(value), np.asarray(expected[name])) for name, value in found.items()}


_ADD_UP = TiedVariables.add_up


def _add_nothing(self: TiedVariables, gradients: dict[int, Any]) -> None:
    """Leave the gradients as they are."""


def compiled_before() -> tuple[dict[str, Any], bool, list[str]]:
    """Return the history of a model that was compiled before `distribute`, whether memory was given back, refusals."""
    with running("pipeline=2:microbatches=2"):
        keras.utils.set_random_seed(1)
        start = keras.Input((4,))
        whole = keras.Model(start, layers.Dense(2)(layers.Dropout(0.5)(layers.Dense(300)(layers.Dense(3)(start)))))
        tensors = [weakref.ref(variable._value) for variable in whole.weights]
        whole.compile(keras.optimizers.SGD(), "mse", metrics=["mae"])
        model, _ = ud.distribute(whole)
        x, y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")
        history = model.fit(
            x, y, batch_size=4, epochs=2, verbose=0, callbacks=[unidist.keras.callbacks.MetricAverageCallback()]
        )
        gc.collect()
        alive = sum(each() is not None for each in tensors)
        refusals = []
        for refused in (whole.get_weights, lambda: model.save("model.keras"), lambda: model(x, training=True)):
            try:
                refused()
            except UsageError as error:
                refusals.append(str(error))
        return history.history, alive == len(model.weights), refusals


def partial_losses() -> dict[str, float]:
    """Return differences to one process of models with a list of outputs, of which one has a loss.

    Micro-batches have as many samples as the model has outputs.
    """
    generator = np.random.default_rng(0)
    x, labels, sizes = generator.standard_normal((8, 4)), generator.integers(0, 3, 8), generator.standard_normal((8, 2))

    def build() -> Any:
        keras.utils.set_random_seed(1)
        start = keras.Input((4,))
        hidden = layers.Dense(8, activation="tanh")(layers.Dense(8, activation="tanh")(start))
        return keras.Model(start, [layers.Dense(3, name="u")(hidden), layers.Dense(2, name="v")(hidden)])

    def losses_of(model: Any, optimizer: Any, loss: Any, targets: Any) -> list[float]:
        model.compile(optimizer, loss, jit_compile=False)
        history = model.fit(x, targets, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
        return [*history, model.evaluate(x, targets, batch_size=8, verbose=0)]

    found = {}
    with computing_in_float64():
        entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        ways: dict[str, tuple[Any, Any]] = {
            "one tensor": ([entropy, None], labels),
            "one tensor, second": ([None, "mse"], sizes),
            "None beside it": ([entropy, None], [labels, None]),
            "both": ([None, "mse"], [labels, sizes]),
            "by name": ({"u": entropy, "v": None}, [labels, sizes]),
        }
        for name, (loss, targets) in ways.items():
            expected = losses_of(build(), keras.optimizers.SGD(0.1), loss, targets)
            keras.utils.clear_session(free_memory=False)
            with running("pipeline=2:microbatches=4"):
                model, optimizer = ud.distribute(build(), keras.optimizers.SGD(0.1))
                found[name] = largest_error(np.array(losses_of(model, optimizer, loss, targets)), np.array(expected))
    return found


def surprised(kind: str, engine: str = "auto") -> tuple[str, str, str]:
    """Train until a layer of the second stage does something unexpected; return what became of this rank.

    Args:
        kind: "raises" or "dies" in the forward of a later step; "differs": the ranks have different data.
        engine: what to use.

    Returns:
        Type and text of the error, and what a step with equal data came to afterwards, "" after a lost rank.
    """
    calls = []

    def surprise(values: Any) -> Any:
        calls.append(None)
        if len(calls) == 6:
            if kind == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such word")
        return values

    class Surprising(layers.Layer):  # type: ignore[misc]  # keras has no types
        def call(self, x: Any) -> Any:
            if kind == "differs":
                return x
            found = tf.ensure_shape(tf.numpy_function(surprise, [x], x.dtype), x.shape)
            return x + 0.0 * tf.stop_gradient(found)

    with running(f"pipeline={os.environ['UNIDIST_WORLD_SIZE']}:microbatches=4:split=second", engine):
        keras.utils.set_random_seed(1)
        start = keras.Input((4,))
        x = layers.Dense(4, name="second")(layers.Dense(4)(start))
        x = Surprising()(x)
        step = ud.TrainStep(
            keras.Model(start, layers.Dense(2)(x)), keras.optimizers.SGD(), keras.losses.MeanSquaredError()
        )
        features, targets = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")
        try:
            for number in range(4):
                step(features * (1 + (number == 2 and kind == "differs") * ud.rank()), targets)
        except Exception as error:
            again = "trained" if kind == "differs" and float(step(features, targets)) > 0 else ""
            return type(error).__name__, str(error), again
    return "nothing", "", ""


def misread_targets(verify: str) -> tuple[str, str]:
    """Train with targets that are given to the wrong outputs, as they were once; return kind and text of the error."""
    from unidist_pipeline._keras import fit

    start = keras.Input((4,))
    hidden = layers.Dense(8, activation="tanh")(layers.Dense(8, activation="tanh")(start))
    model = keras.Model(start, [layers.Dense(2, name="u")(hidden), layers.Dense(2, name="v")(hidden)])
    generator = np.random.default_rng(0)
    x, targets = generator.standard_normal((4, 4)), generator.standard_normal((4, 2))
    with set_variables({"UNIDIST_VERIFY": verify}), running("pipeline=2:microbatches=2"):
        plain = fit.targets_of_outputs
        fit.targets_of_outputs = lambda targets, *rest: targets
        try:
            model, optimizer = ud.distribute(model, keras.optimizers.SGD(0.1))
            model.compile(optimizer, ["mse", None], jit_compile=False)
            model.fit(x, targets, batch_size=4, epochs=1, verbose=0)
        except Exception as error:
            return type(error).__name__, str(error)
        finally:
            fit.targets_of_outputs = plain
    return "", ""
