"""What ZeRO does to Keras models and optimizers, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

import unidist.tensorflow as ud  # noqa: E402 - after TensorFlow is known to be there
import unidist_zero  # noqa: E402 - after TensorFlow is known to be there
from unidist.buffer import DType  # noqa: E402 - after TensorFlow is known to be there
from unidist.errors import ConfigurationError, UsageError  # noqa: E402 - after TensorFlow is known to be there
from unidist.jobs import SpillFolder  # noqa: E402
from unidist_tensorflow.memory import address_of, array_of  # noqa: E402 - after TensorFlow is known to be there
from unidist_zero._keras.fragments.fsdp_units import find_units  # noqa: E402 - after TensorFlow is known to be there
from unidist_zero._keras.offload import FileBuffers  # noqa: E402 - after TensorFlow is known to be there
from unidist_zero._keras.optimizer_rebuild import (  # noqa: E402 - after TensorFlow is known to be there
    restore_variables,
    single_variables,
    unbuild,
)


@pytest.fixture(autouse=True)
def _runtime() -> Iterator[None]:
    ud.init()
    yield
    ud.shutdown()


def dense(**options: Any) -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="first", **options)])
    model.add(keras.layers.Dense(2, name="second"))
    return model


def one_step(model: Any, optimizer: Any) -> None:
    with tf.GradientTape() as tape:
        outputs = tf.cast(model(tf.ones((2, 4)), training=True), tf.float32)
        loss = optimizer.scale_loss(tf.reduce_sum(tf.square(outputs - 1.0)))
    variables = model.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)


def test_layers_of_a_model_and_of_models_in_it_are_units_and_what_they_share_belongs_to_the_root() -> None:
    shared = keras.layers.Dense(4, name="shared")

    class Uses(keras.layers.Layer):
        """Has a layer that another one has too."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.own = shared, keras.layers.Dense(4)

        def call(self, x: Any) -> Any:
            """Return the same shape."""
            return self.own(self.inner(x))

    class Stack(keras.layers.Layer):
        """Blocks of its own, and a variable."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = [keras.Sequential([keras.layers.Dense(4)], name=f"block_{i}") for i in range(2)]

        def build(self, shape: Any) -> None:
            """Build the blocks."""
            self.factor = self.add_weight((), name="factor")
            for block in self.blocks:
                block.build(shape)

        def call(self, x: Any) -> Any:
            """Return the same shape."""
            return self.blocks[1](self.blocks[0](x)) * self.factor

    features = keras.Input((4,))
    within = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="a"), keras.layers.ReLU()])
    model = keras.Model(features, shared(Uses()(Stack()(within(features)))))
    units = find_units(model, model.trainable_variables)
    names = [[variable.path.rpartition("/")[2] for variable in unit.variables] for unit in units]
    assert [unit.layer.name.rpartition("_")[0] or unit.layer.name for unit in units[:-1]] == [
        "a",
        "dense",
        "dense",
        "uses",
    ]
    assert units[-1].layer is model
    assert names == [["kernel", "bias"]] * 4 + [["factor", "kernel", "bias"]]
    assert [id(variable) for variable in units[-1].variables[1:]] == [id(shared.kernel), id(shared.bias)]


def test_at_stage_3_values_are_found_in_calls_and_within_gathered_only(tmp_path: Path) -> None:
    model, optimizer = ud.distribute(dense(), keras.optimizers.SGD(0.1), "zero=3")
    kernel = model.layers[0].kernel
    assert tuple(kernel.shape) == (4, 3)
    for ask in (kernel.numpy, model.get_weights, lambda: kernel + 1.0, lambda: kernel.assign(np.zeros((4, 3)))):
        with pytest.raises(UsageError, match=r"first/kernel': each rank holds a fragment of it"):
            ask()
    with unidist_zero.gathered(model):
        assert kernel.numpy().shape == (4, 3)
        kernel.assign(np.ones((4, 3)))
        model.save_weights(tmp_path / "saved.weights.h5")
        with pytest.raises(UsageError, match="gathered already"), unidist_zero.gathered(model):
            pass
    one_step(model, optimizer)
    other = dense()
    other.load_weights(tmp_path / "saved.weights.h5")
    np.testing.assert_array_equal(other.layers[0].kernel, np.ones((4, 3)))
    with unidist_zero.gathered(model):
        assert not np.array_equal(kernel, other.layers[0].kernel)
        assert kernel.numpy().shape == (4, 3)


@pytest.mark.parametrize(
    ("make", "strategy", "error", "text"),
    [
        (lambda: dense(kernel_constraint="unit_norm"), "zero=3", UsageError, "has a constraint"),
        (lambda: dense(kernel_regularizer="l2"), "zero=3", UsageError, "has a regularizer"),
        (lambda: keras.Sequential([keras.layers.Dense(2)]), "zero=3", UsageError, "build it before distribute"),
        (dense, "zero=3:shard=1", ConfigurationError, "shard= does not work with Keras"),
    ],
)
def test_what_stage_3_cannot_do_is_an_error(make: Any, strategy: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ud.distribute(make(), keras.optimizers.SGD(0.1), strategy)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("strategy", ["zero=1", "zero=2:whole=true"])
def test_an_optimizer_that_is_built_keeps_its_state(strategy: str, scaled: bool) -> None:
    outcomes = []
    for distributes in (False, True):
        keras.utils.set_random_seed(0)
        model, optimizer = dense(), keras.optimizers.Nadam(0.1, use_ema=True, ema_overwrite_frequency=2)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=3)
        for step in range(4):
            if distributes and step == 2:
                model, optimizer = ud.distribute(model, optimizer, strategy)
            one_step(model, optimizer)
        assert int(optimizer.iterations) == 4
        outcomes.append([variable.numpy() for variable in model.weights])
        outcomes[-1] += [optimizer.dynamic_scale.numpy()] if scaled else []
    for found, expected in zip(*outcomes, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_an_optimizer_that_is_taken_apart_and_built_for_others_has_the_same_single_variables() -> None:
    inner = keras.optimizers.Nadam(0.1, use_ema=True)
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    first, second = (dense().trainable_variables for _ in range(2))
    optimizer.build(first)
    count, singles = len(optimizer.variables), single_variables(optimizer)
    listed = {id(each) for each in optimizer.variables} & {id(each) for each in singles}
    inner._u_product.assign(0.25)
    kept = [(owner, unbuild(owner)) for owner in (inner, optimizer)]
    assert not inner.built
    assert not optimizer.built
    optimizer.build(second[:3])
    for owner, variables in kept:
        restore_variables(owner, variables)
    assert [id(each) for each in single_variables(optimizer)] == [id(each) for each in singles]
    assert float(inner._u_product) == 0.25
    found = [id(each) for each in optimizer.variables]
    assert listed <= set(found)
    assert len(set(found)) == len(found) == count - 3  # two moments and an average of one variable less
    assert [each.path for each in inner._trainable_variables] == [each.path for each in second[:3]]


def test_saving_the_model_says_that_the_state_of_the_optimizer_is_not_in_the_file(tmp_path: Path) -> None:
    model, optimizer = ud.distribute(dense(), keras.optimizers.Adam(0.1), "zero=1")
    model.compile(optimizer, "mse", jit_compile=False)
    model.train_on_batch(np.ones((2, 4)), np.ones((2, 2)))
    with pytest.warns(UserWarning, match=r"state is sharded over the ranks and is not in this file"):
        model.save(tmp_path / "model.keras")
    found = keras.models.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_array_equal(found.layers[0].kernel, model.layers[0].kernel)


def test_what_has_the_optimizer_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ud.shutdown()
    monkeypatch.setenv("UNIDIST_STRATEGY", "zero=2")
    ud.init()
    for make in (lambda: ud.DistributedOptimizer(keras.optimizers.SGD(0.1)), lambda: ud.DistributedGradientTape(tape)):
        with (
            tf.GradientTape() as tape,
            pytest.raises(UsageError, match=r"use model, optimizer = distribute\(model, optimizer\)"),
        ):
            make()


@pytest.mark.parametrize("strategy", ["zero=2,precision=bf16", "zero=1,precision=fp16", "zero=3,precision=bf16"])
def test_variables_of_16_bits_are_updated_in_32(strategy: str) -> None:
    model = dense()
    before = model.trainable_variables[0].numpy()
    model, optimizer = ud.distribute(model, keras.optimizers.SGD(1e-4), strategy)
    for _ in range(40):  # each step is far less than 16 bits can tell from nothing
        one_step(model, optimizer)
    assert {variable.dtype for variable in optimizer._trainable_variables} == {"float32"}
    with unidist_zero.gathered(model):
        kernel = model.trainable_variables[0]
        assert kernel.dtype in ("bfloat16", "float16")
        assert np.abs(kernel.numpy().astype("float32") - before).max() > 1e-3


def is_in_file(variable: Any) -> bool:
    """Return whether a variable's memory is that of a file that has been removed."""
    address = address_of(array_of(tf.convert_to_tensor(variable)))
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(text, 16) for text in line.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            return "/unidist-" in line
    return False


@pytest.mark.parametrize(
    ("strategy", "in_graph"), [("zero=1,precision=bf16", False), ("zero=2,precision=fp16", True), ("zero=3", True)]
)
def test_state_in_files_is_the_same_state(tmp_path: Path, strategy: str, in_graph: bool) -> None:
    def trained(options: str) -> tuple[Any, Any, list[Any]]:
        keras.utils.set_random_seed(0)
        first, _, others = strategy.partition(",")
        model, optimizer = ud.distribute(
            dense(), keras.optimizers.AdamW(0.1), ",".join([first + options, others]).strip(",")
        )
        step = tf.function(lambda: one_step(model, optimizer)) if in_graph else lambda: one_step(model, optimizer)
        for _ in range(3):
            step()
        with unidist_zero.gathered(model):
            return model, optimizer, [variable.numpy() for variable in model.variables]

    _, plain, expected = trained("")
    _, optimizer, found = trained(f":offload={tmp_path}")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    slots = [each for each in optimizer.variables if tuple(each.shape) not in ((), (1,))]
    assert len(slots) >= 2
    assert all(map(is_in_file, slots))
    assert not any(is_in_file(each) for each in plain.variables if each.shape)
    assert not list(tmp_path.iterdir()), "a file has no name any more once it is mapped"


def test_files_that_are_used_no_more_are_given_out_again_until_other_sizes_are_wanted(tmp_path: Path) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(f"{tmp_path}/unidist-")

    buffers = FileBuffers(SpillFolder(tmp_path, option="zero:offload", contents="optimizer state"))
    kept, idle = buffers.acquire(4096, DType.FLOAT32), buffers.acquire(4096, DType.FLOAT32)
    del idle
    again = buffers.acquire(4096, DType.FLOAT32)
    assert mapped() == 2
    del again
    buffers.forget()
    assert mapped() == 1
    del kept
    assert mapped() == 0


def test_options_for_models_of_pytorch_are_refused() -> None:
    for options in ("shared=true", "offload=host"):
        model = dense()
        with pytest.raises(ConfigurationError, match=f"zero:{options} does not work with tensorflow"):
            ud.distribute(model, keras.optimizers.Adam(), f"zero=2:{options}")
