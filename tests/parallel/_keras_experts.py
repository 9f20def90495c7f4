"""Trainings in Keras with experts on the ranks of a pool, many in one call, each beside one process."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import unidist.keras as ud
from unidist.checkpoint.format.interface import placements_of
from unidist.errors import UnidistError
from unidist.settings.environment import set_variables
from unidist.testing._training import largest_error
from unidist_expert_parallel.keras import MixtureOfExperts
from unidist_keras.checkpoint import stable_paths
from unidist_tensorflow.memory import dtype_of

ROWS, TOKENS, FEATURES, WIDTH, EXPERTS, STEPS = 16, 3, 5, 8, 8, 2
MAX_NORM = 0.3
L = keras.layers
Parameters = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        layer: name of `LAYERS`.
        strategy: the strategy line.
        loop: a loop of the script in place of `train_on_batch`.
        uneven: ranks have different numbers of samples, the last one none; needs a loop.
        passes: calls of a step that make an update.
        steps: updates.
        first: number of the first of them.
        loads: folder of a checkpoint to begin with.
        saves: folder for one at the end.
    """

    layer: str = "plain"
    strategy: str = "expert=2"
    loop: bool = False
    uneven: bool = False
    passes: int = 1
    steps: int = STEPS
    first: int = 0
    loads: str = ""
    saves: str = ""


LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "switch": {
        "top_k": 1, "kind": "relu", "capacity_factor": 1.0, "balance_coefficient": 0.1, "z_coefficient": 0.01,
    },
    "limited": {"kind": "gelu", "use_bias": True, "capacity_factor": 0.6, "balance_coefficient": 0.2},
    "losses": {"top_k": 3, "normalize": False, "balance_coefficient": 0.3, "z_coefficient": 0.1},
    "after": {"top_k": 3, "softmax": "after"},
    "one": {"top_k": 1},
}  # fmt: skip


def make(layer: str) -> Any:
    """Return the model with the same random values everywhere."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((TOKENS, FEATURES))
    x = L.Dense(WIDTH)(inputs)
    for number in range(2):
        x = L.Add()([x, L.Dense(WIDTH)(L.Dense(WIDTH, "gelu")(x))])
        normed = L.LayerNormalization()(x)
        experts = MixtureOfExperts(EXPERTS, hidden=6, name=f"experts_{number}", **LAYERS[layer])
        x = L.Add()([x, experts(keras.ops.abs(normed) + 0.1)])
    model = keras.Model(inputs, L.Dense(4)(x))
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(variable + 0.3 * rng.normal(size=variable.shape))
    if layer == "one":
        for number in range(2):
            weights = -np.ones((EXPERTS, WIDTH))
            weights[-1] = 1.0
            model.get_layer(f"experts_{number}").router.assign(weights)
    return model


def optimizer_of() -> Any:
    """Return one that moves parameters whose gradient is zero, too."""
    return keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3)


def batch(step: int, turn: int) -> tuple[Any, Any]:
    """Return inputs and targets of all ranks."""
    rng = np.random.default_rng((7, step, turn))
    return rng.normal(size=(ROWS, TOKENS, FEATURES)), rng.normal(size=(ROWS, TOKENS, 4))


def criterion(outputs: Any, targets: Any) -> Any:
    """Return the mean over all numbers."""
    return tf.reduce_mean(tf.square(outputs - targets))


def alone(case: Case) -> tuple[Parameters, list[float]]:
    """Train in this process, without unidist; return parameters, by stable paths, and losses."""
    model, optimizer = make(case.layer), optimizer_of()
    losses = []
    for number in range(case.first + case.steps):
        with tf.GradientTape() as tape:
            total = 0.0
            for turn in range(case.passes):
                inputs, targets = batch(number, turn)
                total += (criterion(model(inputs, training=True), targets) + sum(model.losses)) / case.passes
        gradients = tape.gradient(total, model.trainable_variables)
        if "clip_norm" in case.strategy:
            factor = min(1.0, MAX_NORM / (float(tf.linalg.global_norm(gradients)) + 1e-6))
            gradients = [gradient * factor for gradient in gradients]
        optimizer.apply(gradients, model.trainable_variables)
        losses.append(float(total))
    return {path: np.array(variable) for path, variable in stable_paths(model.weights).items()}, losses[case.first :]


def shares(rank: int, size: int, uneven: bool) -> slice:
    """Return this rank's rows of the batch."""
    if not uneven:
        each = ROWS // size
        return slice(rank * each, (rank + 1) * each)
    bounds = [0, *(ROWS * (number + 1) ** 2 // (size - 1) ** 2 for number in range(size - 1)), ROWS]
    return slice(bounds[rank], bounds[rank + 1])


def in_float64(function: Any, *args: Any) -> Any:
    """Call a function with Keras computing in float64."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        return function(*args)
    finally:
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(before)


def errors_of(cases: Sequence[Case]) -> dict[str, float | str]:
    """Train each; return the largest difference from one process, or the error's text, by the case's text."""
    return {str(case): in_float64(_outcome, case) for case in cases}


def _outcome(case: Case) -> float | str:
    try:
        reference = alone(case)
        with set_variables({"UNIDIST_STRATEGY": case.strategy, "UNIDIST_ENGINE": "shm"}):
            ud.init()
            try:
                return _error(case, *reference)
            finally:
                ud.shutdown()
    except Exception:
        return traceback.format_exc(limit=-4)


def _error(case: Case, parameters: Parameters, losses: list[float]) -> float:
    model = make(case.layer)
    model, optimizer = ud.distribute(model, optimizer_of())
    model.compile(optimizer, loss=criterion)
    rank, size = ud.data_rank(), ud.data_size()
    mine = shares(rank, size, case.uneven)
    if case.loads:
        ud.load(case.loads, model, optimizer)
    weight = (mine.stop - mine.start) * size / ROWS  # the mean over ranks shall be that over samples

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def step(inputs: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True)
            loss = tf.reduce_sum(tf.square(outputs - targets)) / (ROWS / size * TOKENS * 4) if case.uneven else None
            loss = (criterion(outputs, targets) * weight if loss is None else loss) + sum(model.losses)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    differences = []
    for number in range(case.first, case.first + case.steps):
        total = 0.0
        for turn in range(case.passes):
            inputs, targets = batch(number, turn)
            if case.loop:
                value = step(tf.constant(inputs[mine]), tf.constant(targets[mine]))
            else:
                model.reset_metrics()
                value = model.train_on_batch(inputs[mine], targets[mine])
            total += float(ud.allreduce(np.asarray(value, np.float64), name="loss")) / case.passes
        differences.append(abs(total - losses[number - case.first]))
    if case.saves:
        ud.save(case.saves, model, optimizer)
    places = placements_of(model)
    for path, variable in stable_paths(model.weights).items():
        place = places.placement(path, tuple(variable.shape), dtype_of(variable))
        expected = parameters[place.name][np.ix_(*place.indices)]
        differences.append(largest_error(np.array(variable), expected))
    return float(max(differences))


def refusals() -> dict[str, str]:
    """Return the errors of what cannot be divided."""
    found = {}

    def attempt(line: str, build: Any) -> str:
        with set_variables({"UNIDIST_STRATEGY": line, "UNIDIST_ENGINE": "shm"}):
            try:
                ud.init()
                ud.distribute(build(), keras.optimizers.SGD())
            except (UnidistError, ValueError) as error:
                return str(error)
            finally:
                ud.shutdown()
        return "accepted"

    dense = [keras.Input((4,)), L.Dense(2)]
    found["nothing"] = attempt("expert=2", lambda: keras.Sequential(dense))
    odd = [keras.Input((4,)), MixtureOfExperts(7)]
    found["odd"] = attempt("expert=2", lambda: keras.Sequential(odd))
    found["zero"] = attempt("expert=2,zero=3", lambda: make("plain"))
    return found


def with_mean_over_holders() -> float | str:
    """Return the error if gradients of experts are summed over all replicas, as those of other parameters are."""
    from unidist_expert_parallel._keras.binding import ExpertPlacements

    plain = ExpertPlacements.gradient_axis
    ExpertPlacements.gradient_axis = lambda self, path: self._inner.gradient_axis(path)  # type: ignore[method-assign]
    try:
        return next(iter(errors_of([Case(steps=1)]).values()))
    finally:
        ExpertPlacements.gradient_axis = plain  # type: ignore[method-assign]
