"""Keras models are cut between layers: Sequential, Functional, models within models, and subclassed ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf
from keras import layers, ops

from unidist.errors import ConfigurationError, UsageError
from unidist_pipeline._keras.released_variables import release
from unidist_pipeline._keras.tracing.costs import measured_costs
from unidist_pipeline._keras.tracing.program import Program
from unidist_pipeline._keras.tracing.split import balanced_starts, corresponding, segments_of, starts_at
from unidist_pipeline._keras.tracing.tracer import programs_of


@pytest.fixture(autouse=True)
def _numbered_from_one() -> None:
    keras.utils.clear_session(free_memory=False)


def names(program: Program) -> list[str]:
    return [str(step.operation.name) for step in program.steps]


def residual(depth: int, width: int = 8) -> Any:
    start = keras.Input((width,))
    x = start
    for number in range(depth):
        inner = layers.Activation("relu")(layers.Dense(2 * width, name=f"wide_{number}")(x))
        x = x + layers.Dense(width, name=f"narrow_{number}")(inner)
    return keras.Model(start, layers.Dense(3, name="head")(x))


def ran(program: Program, starts: list[int], inputs: Any) -> list[Any]:
    """Run the stages one after the other, as ranks do."""
    flat = program.standardize(inputs)
    taken: list[Any] = []
    for segment in segments_of(program, starts):
        values = dict(zip(program.inputs, flat, strict=True)) | dict(zip(segment.takes, taken, strict=True))
        for step in segment.steps:
            values.update(zip(step.results, step.run(values, training=False), strict=True))
        taken = [values[number] for number in segment.passes]
    return taken


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_one_after_the_other_compute_what_the_model_does(num_stages: int) -> None:
    model = residual(5)
    program, _ = programs_of(model)
    inputs = np.random.default_rng(0).standard_normal((4, 8)).astype("float32")
    (found,) = ran(program, balanced_starts(program, num_stages), inputs)
    np.testing.assert_allclose(found, model(inputs), rtol=1e-5)


def test_stages_are_balanced_and_cut_where_little_passes() -> None:
    program, _ = programs_of(residual(4))
    starts = balanced_starts(program, 2)
    assert [names(program)[start] for start in starts] == ["wide_2"]
    assert [len(segment.takes) for segment in segments_of(program, starts)] == [0, 1]


def test_a_skip_connection_passes_through_the_stages_between() -> None:
    start = keras.Input((4,))
    first = layers.Dense(4, name="first")(start)
    x = layers.Dense(4, name="third")(layers.Dense(4, name="second")(first))
    program, _ = programs_of(keras.Model(start, layers.Add()([layers.Dense(4, name="fourth")(x), first])))
    segments = segments_of(program, starts_at(program, ["second", "third", "fourth"]))
    assert [len(segment.takes) for segment in segments] == [0, 1, 2, 2]


def test_models_within_a_model_are_taken_apart() -> None:
    inner = keras.Sequential([layers.Dense(4, name="a"), layers.Dense(4, name="b")], name="inner")
    model = keras.Sequential([keras.Input((4,)), inner, layers.Dense(2, name="c")])
    program, _ = programs_of(model)
    assert names(program) == ["a", "b", "c"]


class Subclassed(keras.Model):  # type: ignore[misc]  # keras has no types
    """A model that does something else in training."""

    def __init__(self, way: str = "fine") -> None:
        super().__init__()
        self.way = way
        self.first, self.second = layers.Dense(4, name="first"), layers.Dense(4, name="second")
        self.dropout, self.own = layers.Dropout(0.5), self.add_weight((4, 4), name="own")

    def build(self, shape: Any) -> None:
        for layer in (self.first, self.second):
            layer.build((None, 4))
        super().build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.dropout(self.first(x), training=training)
        if training:
            x = ops.tanh(x)
        x = self.second(x)
        if self.way == "reads":
            return x @ ops.transpose(self.own)
        return tf.nn.relu(x) if self.way == "tf" else ops.matmul(x, self.own)


def test_a_subclassed_model_is_followed_in_training_and_in_inference() -> None:
    model = Subclassed()
    model.build((None, 4))
    training, inference = programs_of(model)
    assert names(training)[:2] == names(inference)[:2] == ["first", "dropout"]
    assert len(training.steps) == len(inference.steps) + 1
    starts = starts_at(training, ["second"])
    assert names(inference)[corresponding(training, starts, inference)[0]] == "second"
    assert [variable.path.split("/")[-1] for variable in training.steps[-1].variables] == ["own"]
    inputs = np.ones((2, 4), "float32")
    (found,) = ran(inference, corresponding(training, starts, inference), inputs)
    np.testing.assert_allclose(found, model(inputs), rtol=1e-5)


@pytest.mark.parametrize(
    ("way", "says"), [("reads", r"reads the variable '.*own' by itself"), ("tf", "give a Functional or Sequential")]
)
def test_a_call_that_cannot_be_followed_is_refused(way: str, says: str) -> None:
    model = Subclassed(way)
    model.build((None, 4))
    with pytest.raises(UsageError, match=says):
        programs_of(model)


def test_fewer_layers_than_stages_are_named() -> None:
    program, _ = programs_of(residual(1))
    with pytest.raises(ConfigurationError, match=r"3 layers with something to train \(wide_0, narrow_0, head\)"):
        balanced_starts(program, 4)


@pytest.mark.parametrize(
    ("given", "says"), [(["nothing"], "no layer 'nothing'"), (["narrow_1", "wide_0"], "in the order")]
)
def test_names_that_cannot_be_split_points_are_refused(given: list[str], says: str) -> None:
    program, _ = programs_of(residual(2))
    with pytest.raises(ConfigurationError, match=says):
        starts_at(program, given)


@pytest.mark.parametrize("kind", ["time", "memory"])
def test_what_is_measured_decides_the_cut(kind: Any) -> None:
    program, _ = programs_of(residual(4))
    costs = measured_costs(program, np.ones((2, 8), "float32"), kind)
    assert len(costs) == len(program.steps)
    assert min(costs) > 0
    if kind == "memory":
        assert costs[names(program).index("wide_0")] == 2 * 16 * 4


def test_a_released_variable_says_where_its_values_are() -> None:
    variable = keras.Variable(np.ones(3), name="weight")
    release([variable])
    assert tuple(variable.shape) == (3,)
    with pytest.raises(UsageError, match="another rank of the pipeline"):
        variable.numpy()
    with pytest.raises(UsageError, match="another rank of the pipeline"):
        variable.assign(np.zeros(3))
