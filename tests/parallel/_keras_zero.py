"""Trainings in Keras under ZeRO that run on the ranks of a pool, many in one call, each beside one process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import unidist.tensorflow as ud
import unidist_zero
from unidist import context
from unidist.environment import set_variables
from unidist.testing._training import largest_error
from unidist.testing.recording import Record, RecordingCommunicator
from unidist_tensorflow.checkpoint_names import stable_paths
from unidist_tensorflow.conformance import computing_in_float64

BATCH = 12
Parameters = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        strategy: the strategy line.
        optimizer: name of `OPTIMIZERS`.
        mode: "eager", "function" or "fit".
        options: more arguments of the optimizer.
        passes: calls of a step that make an update.
        steps: updates.
        scaled: put the optimizer into a LossScaleOptimizer.
        excluded: names that are left out of weight decay.
        constrained: the head's rows are kept at unit norm.
        layered: train a model of layers, else one with variables of its own.
        noisy: with dropout and batch normalization, which only one rank has like one process.
        deferred: the layered model is built without values, with another seed on each rank.
    """

    strategy: str = "zero=2"
    optimizer: str = "adamw"
    mode: str = "eager"
    options: dict[str, Any] = field(default_factory=dict)
    passes: int = 1
    steps: int = 5
    scaled: bool = False
    excluded: tuple[str, ...] = ()
    constrained: bool = False
    layered: bool = False
    noisy: bool = False
    deferred: bool = False


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda **options: keras.optimizers.SGD(_rate(), momentum=0.9, **options),
    "adamw": lambda **options: keras.optimizers.AdamW(0.01, **{"weight_decay": 0.1, **options}),
    "muon": lambda **options: keras.optimizers.Muon(0.01, weight_decay=0.1, **options),
    "lamb": lambda **options: keras.optimizers.Lamb(0.01, **options),
    "adafactor": lambda **options: keras.optimizers.Adafactor(0.01, **options),
    "nadam": lambda **options: keras.optimizers.Nadam(0.01, **options),
    "schedule_free": lambda **options: keras.optimizers.ScheduleFreeAdamW(0.01, **options),
}


def _rate() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=2, decay_rate=0.7)


class Model(keras.Model):
    """Sizes that no number of ranks divides; a variable used twice, one frozen, one without a gradient, a scalar."""

    def __init__(self, *, constrained: bool = False) -> None:
        super().__init__()
        generator = np.random.default_rng(0)

        def weight(name: str, *shape: int, trainable: bool = True, constraint: Any = None) -> Any:
            values = 0.3 * generator.standard_normal(shape)
            return self.add_weight(
                shape,
                initializer=lambda shape, dtype: ops.cast(values, dtype),
                dtype="float64",
                trainable=trainable,
                constraint=constraint,
                name=name,
            )

        self.inner = weight("inner", 11, 7)
        self.frozen = weight("frozen", 11, trainable=False)
        self.unused = weight("unused", 5, 5)
        self.head = weight("head", 3, 7, constraint=keras.constraints.UnitNorm(axis=1) if constrained else None)
        self.bias = weight("bias", 3)
        self.scale = weight("scale")
        self.empty = weight("empty", 0)

    def call(self, features_BF: Any) -> Any:  # noqa: N803 - dims: batch, features
        """Return the logits, `(batch, classes)`."""
        hidden_BH = ops.tanh(features_BF @ ops.transpose(self.inner) + self.frozen)  # noqa: N806
        return self.scale * (ops.tanh(hidden_BH @ self.inner) @ ops.transpose(self.head)) + self.bias


def _loss(labels: Any, logits: Any) -> Any:
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


class Block(keras.layers.Layer):
    """A layer of layers, with one that is used twice."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.inner = keras.layers.Dense(width, activation="tanh", name="inner")

    def build(self, shape: Any) -> None:
        """Build the layers."""
        self.norm.build(shape)
        self.inner.build(shape)
        super().build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        """Return the same shape."""
        return x + self.inner(self.norm(self.inner(x)))


class Noisy(Block):
    """A block with dropout."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(width, **options)
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, x: Any, training: bool = False) -> Any:
        """Return the same shape."""
        return super().call(self.dropout(x, training=training))


def layered(*, noisy: bool, seed: int = 3) -> Any:
    """Return a model of layers whose sizes no number of ranks divides; three of them lie in a model within it."""
    keras.utils.set_random_seed(seed)
    features = keras.Input((7,))
    x = keras.layers.Dense(11, activation="tanh", name="first")(features)
    x = Block(11, name="block_a")(x)
    inside = keras.Input((11,))
    y = Block(11, name="block_b")(inside)
    if noisy:
        y = keras.layers.BatchNormalization(name="batch_norm")(Noisy(11, name="noisy")(y))
    x = keras.Model(inside, y, name="within")(x)
    return keras.Model(features, keras.layers.Dense(3, name="head")(x))


def make(case: Case) -> tuple[Any, Any]:
    """Return model and optimizer, not distributed."""
    model: Any
    if case.deferred:
        with unidist_zero.deferred():
            model = layered(noisy=case.noisy, seed=3 + ud.rank())
    else:
        model = layered(noisy=case.noisy) if case.layered else Model(constrained=case.constrained)
    if not case.layered:
        model.build((None, 7))
    optimizer: Any = OPTIMIZERS[case.optimizer](**case.options)
    if case.excluded:
        optimizer.exclude_from_weight_decay(var_names=list(case.excluded))
    if case.scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0, dynamic_growth_steps=3)
    return model, optimizer


def data(num_batches: int) -> list[tuple[Any, Any]]:
    """Return the first batches of all ranks together."""
    generator = np.random.default_rng(7)
    return [(generator.standard_normal((BATCH, 7)), generator.integers(0, 3, BATCH)) for _ in range(num_batches)]


def train(case: Case, model: Any, optimizer: Any, batches: Sequence[tuple[Any, Any]]) -> Parameters:
    """Train on these batches, in the way of the case; returns the variables."""
    step_through(case, model, optimizer, batches)
    return values(model)


def step_through(case: Case, model: Any, optimizer: Any, batches: Sequence[tuple[Any, Any]]) -> None:
    """Train on these batches."""
    if case.mode == "fit":
        model.compile(optimizer, _loss, jit_compile=False)
        features, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        model.fit(features, labels, batch_size=len(batches[0][0]), shuffle=False, verbose=0)
    else:
        scale = optimizer.scale_loss if case.scaled else lambda loss: loss

        def step(features: Any, labels: Any) -> None:
            with tf.GradientTape() as tape:
                loss = scale(_loss(labels, model(features, training=True)))
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        run = tf.function(step) if case.mode == "function" else step
        for features, labels in batches:
            run(tf.constant(features), tf.constant(labels))


def values(model: Any) -> Parameters:
    """Return copies of the variables, by name."""
    with unidist_zero.gathered(model):
        return {path: np.array(variable.numpy()) for path, variable in stable_paths(model.weights).items()}


def alone(case: Case) -> Parameters:
    """Return what one process comes to, on the batches of a window concatenated."""
    whole = data(case.steps * case.passes)
    windows = [whole[start : start + case.passes] for start in range(0, len(whole), case.passes)]
    batches = [tuple(np.concatenate(parts) for parts in zip(*window, strict=True)) for window in windows]
    model, optimizer = make(case)
    found = train(replace(case, mode="eager"), model, optimizer, batches)  # the quickest way
    if case.mode == "fit":
        optimizer.finalize_variable_values(model.trainable_variables)
        found = values(model)
    return found


def share(batches: Sequence[tuple[Any, Any]], rank: int, size: int) -> list[tuple[Any, Any]]:
    """Return one rank's share of each batch."""
    each = BATCH // size
    return [tuple(part[rank * each : (rank + 1) * each] for part in batch) for batch in batches]


def run_cases(cases: Sequence[Case], *, exchanged: bool = True) -> list[dict[str, float]]:
    """Return for each case the largest error of each variable, beside one process.

    Args:
        cases: what to train, one after the other.
        exchanged: False: each rank trains on its own share, without an exchange.
    """
    return [_beside_one_process(case, exchanged) for case in cases]


def _beside_one_process(case: Case, exchanged: bool) -> dict[str, float]:
    with computing_in_float64():
        expected = alone(replace(case, deferred=False))
        with _running(case):
            model, optimizer = make(case)
            if exchanged:
                model, optimizer = ud.distribute(model, optimizer)
            found = train(case, model, optimizer, share(data(case.steps * case.passes), ud.rank(), ud.size()))
            if exchanged:
                _check_share(case, model, optimizer)
    return {name: largest_error(found[name], value) for name, value in expected.items()}


def _check_share(case: Case, model: Any, optimizer: Any) -> None:
    """Raise unless this rank keeps about its share of the optimizer's state, and at stage 3 of the variables."""
    if case.strategy.startswith("zero") and "whole" not in case.strategy and case.optimizer in ("sgd", "adamw"):
        count = sum(int(np.prod(each.shape)) for each in model.trainable_variables)
        kept = sum(int(np.prod(each.shape)) for each in optimizer.variables)
        slots = {"sgd": 1, "adamw": 2}[case.optimizer] + bool(case.options.get("use_ema"))
        assert kept <= slots * (count / ud.size() + 60) + 10, f"{kept} elements of state for {count} elements"
        if "zero=3" in case.strategy and ud.size() > 1:
            held = sum(int(np.prod(each.value.shape)) for each in model.trainable_variables)
            assert held <= count / ud.size() + 60, f"{held} of {count} elements of the variables are here"


@contextmanager
def _running(case: Case) -> Iterator[None]:
    with set_variables({"UNIDIST_STRATEGY": case.strategy, "UNIDIST_ENGINE": "auto"}):
        ud.init()
        try:
            yield
        finally:
            ud.shutdown()
            gc.collect()


def go_on(jobs: Sequence[tuple[Case, int, str, str]]) -> list[dict[str, float]]:
    """Train a part of each case, from one checkpoint to another; return the errors beside one process.

    Args:
        jobs: the case, whose steps are counted to the end of this part; its first step; the checkpoints.
    """
    errors = []
    with computing_in_float64():
        for case, first, loads, saves in jobs:
            expected = alone(case)
            with _running(case):
                model, optimizer = ud.distribute(*make(case))
                if loads:
                    for variable in [] if "zero=3" in case.strategy else model.trainable_variables:
                        variable.assign(variable + 1.0)  # so that it is seen if nothing is loaded
                    assert ud.load(loads, model, optimizer).extra == {"next": first}
                batches = data(case.steps * case.passes)[first:]
                found = train(case, model, optimizer, share(batches, ud.rank(), ud.size()))
                ud.save(saves, model, optimizer, extra={"next": case.steps})
            errors.append({name: largest_error(found[name], value) for name, value in expected.items()})
    return errors


def record_step(case: Case) -> tuple[dict[str, int], int, int]:
    """Return what the second step communicates, and the elements of one rank's share and of all.

    Returns:
        Bytes by operation, as `Record` counts them; elements of a shard, and of all shards, padding included.
    """
    records: list[Record] = []
    with computing_in_float64(), _running(case):
        runtime = context.current()
        new = runtime.new_communicator
        runtime.new_communicator = lambda *a, **k: RecordingCommunicator(new(*a, **k), records)  # type: ignore[method-assign]  # this run only
        model, optimizer = ud.distribute(*make(case))
        first, second = share(data(2), ud.rank(), ud.size())
        step_through(case, model, optimizer, [first])
        records.clear()
        step_through(case, model, optimizer, [second])
        found: dict[str, int] = {}
        for record in records:
            found[record.operation] = found.get(record.operation, 0) + record.nbytes
        carried = model.__dict__.get("_unidist")
        partition = (optimizer._unidist._update.exchanges[0] if carried is None else carried).partition
        return found, sum(cut.counts[ud.rank()] for cut in partition.buckets), sum(c.count for c in partition.buckets)
