"""`save` and `load` of Keras on JAX: training goes on with any number of ranks, any strategy, and other frameworks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import optax
import pytest
from _keras_training import BATCH, FEATURES, loss, network, runtime, samples, share_of, values
from part_pools import PartOfPool, PartPools

import unidist.jax as ud_jax
import unidist.keras as ud
from unidist.checkpoint.format.index import Index
from unidist.errors import CheckpointError, UsageError
from unidist.settings.environment import set_variables

pytestmark = pytest.mark.parallel

optimizers = keras.optimizers
UPDATES = 10

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optimizers.AdamW(0.02, weight_decay=0.1, clipnorm=0.5),
    "moving averages": lambda: optimizers.Adam(0.02, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "scaled loss": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.02), dynamic_growth_steps=3),
    "schedule": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "lamb": lambda: optimizers.Lamb(0.02),
}


def batches(steps: range) -> Any:
    x, y = samples(UPDATES)
    for step in steps:
        rows = slice(step * BATCH + ud.rank(), (step + 1) * BATCH, ud.size())
        yield x[rows], y[rows]


def train(name: str, strategy: str, loads: str, saves: str, steps: range) -> list[Any]:
    """Train from a checkpoint to another one; return the weights."""
    with set_variables({"UNIDIST_STRATEGY": strategy}), runtime():
        model, optimizer = network(), OPTIMIZERS[name]()
        if loads:
            model.set_weights([weight + 1 for weight in model.get_weights()])
        model, optimizer = ud.distribute(model, optimizer)
        model.compile(optimizer, loss())
        if loads:
            ud.load(loads, model, optimizer)
        for batch in batches(steps):
            model.train_on_batch(*batch)
        if saves:
            ud.save(saves, model, optimizer)
        return values(model)


def alone(name: str) -> list[Any]:
    return train(name, "data", "", "", range(UPDATES))


def close(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("momentum", ("data", 2), ("zero=1", 4)),
        pytest.param("adamw", ("zero=2", 4), ("zero=1", 2), marks=pytest.mark.soak),
        ("moving averages", ("zero=1", 4), ("data", 1)),
        ("scaled loss", ("zero=1", 2), ("zero=2:whole=true", 4)),
        pytest.param("schedule", ("data", 1), ("zero=1", 2), marks=pytest.mark.soak),
        ("lamb", ("zero=1", 2), ("zero=1", 4)),
    ],
)
def test_training_goes_on_with_other_ranks_and_strategies_as_if_it_had_not_stopped(
    jax_pools: PartPools, tmp_path: Path, name: str, first: tuple[str, int], then: tuple[str, int]
) -> None:
    [wanted] = jax_pools.get(1).run(alone, (name,))
    path = str(tmp_path / "half")
    for (strategy, size), loads, saves, steps in (
        (first, "", path, range(5)),
        (then, path, "", range(5, UPDATES)),
    ):
        found = jax_pools.get(size, engine="shm").run(train, (name, strategy, loads, saves, steps))
    for each in found:
        close(each, wanted)
    # Without the state of the optimizer it would not be so.
    index = Index.read(tmp_path / "half")
    assert index.sections["optimizer"].tensors


def test_it_is_saved_and_loaded_within_fit(two: PartOfPool, tmp_path: Path) -> None:
    """`fit` keeps the state to itself, and donates it to the next step; a slow writer must not notice."""

    def on_rank(path: str) -> None:
        with runtime():
            model, optimizer = ud.distribute(network(), optimizers.Adam(0.02))
            model.compile(optimizer, loss())

            def at(batch: int, logs: Any) -> None:
                if batch == 1:
                    ud.save(path, model, optimizer, step=1, asynchronous=True)
                if batch == 3:
                    ud.load(path, model, optimizer)

            each = keras.callbacks.LambdaCallback(on_train_batch_end=at)
            arrays = share_of(samples(5), 5)
            model.fit(*arrays, batch_size=BATCH // ud.size(), shuffle=False, verbose=0, callbacks=[each])
            other, its = ud.distribute(network(), optimizers.Adam(0.02))
            other.compile(its, loss())
            own = BATCH // ud.size()
            for number in (0, 1, 4):
                other.train_on_batch(*(array[number * own : (number + 1) * own] for array in arrays))
            close(values(model), values(other))
            assert int(optimizer.iterations.numpy()) == 3

    two.run(on_rank, (str(tmp_path / "series"),))


class _Interruption(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise InterruptedError


def test_an_interrupted_fit_resumes_from_its_backup(two: PartOfPool, tmp_path: Path) -> None:
    def fit(*callbacks: Any) -> tuple[list[int], list[Any]]:
        model, optimizer = ud.distribute(network(), optimizers.Adam(0.01), "zero=1")
        model.compile(optimizer, loss())
        arrays = share_of(samples())
        history = model.fit(*arrays, batch_size=6, epochs=4, shuffle=False, verbose=0, callbacks=list(callbacks))
        return history.epoch, values(model)

    def on_rank(path: str) -> None:
        with runtime():
            _, wanted = fit()
            with pytest.raises(InterruptedError):
                fit(ud.callbacks.BackupAndRestore(path), _Interruption())
            epochs, found = fit(ud.callbacks.BackupAndRestore(path))
            assert epochs == [2, 3]
            close(found, wanted)

    two.run(on_rank, (str(tmp_path / "backup"),))


def test_statistics_seeds_and_extra_values_come_back(two: PartOfPool, tmp_path: Path) -> None:
    def on_rank(path: str) -> None:
        with runtime():
            layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(3)]
            model = keras.Sequential([keras.Input((FEATURES,)), *layers])
            model, optimizer = ud.distribute(model, optimizers.Adam(0.02))
            model.compile(optimizer, loss())
            model.fit(*share_of(samples()), batch_size=6, verbose=0)
            optimizer.learning_rate = 0.005
            before = values(model)
            ud.save(path, model, optimizer, extra={"x": jax.numpy.arange(3.0), "epoch": 7}, rng=True)
            ones = np.ones((1, FEATURES))
            drawn = np.asarray(model(ones, training=True))
            model.fit(*share_of(samples()), batch_size=6, verbose=0)
            optimizer.learning_rate = 0.5
            loaded = ud.load(path, model, optimizer, rng=True)
            np.testing.assert_array_equal(np.asarray(model(ones, training=True)), drawn)
            assert loaded.extra["epoch"] == 7
            np.testing.assert_array_equal(loaded.extra["x"], np.arange(3.0))
            assert float(optimizer.learning_rate) == np.float32(0.005)
            ud.load(path, model, optimizer)
            if ud.rank() == 0:  # statistics of a BatchNormalization are each rank's own; one of them was saved
                close(
                    [each for each, kept in zip(values(model), before, strict=True) if kept.shape != (FEATURES,)],
                    [kept for kept in before if kept.shape != (FEATURES,)],
                )
            assert int(optimizer.iterations.numpy()) == 4

    two.run(on_rank, (str(tmp_path / "run"),))


def test_what_does_not_fit_is_an_error_on_every_rank(two: PartOfPool, tmp_path: Path) -> None:
    def on_rank(path: str) -> None:
        with runtime():
            model, optimizer = ud.distribute(network(), optimizers.Adam(0.02), "zero=1")
            ud.save(path, model, optimizer)
            with pytest.raises(CheckpointError, match=r"saved by Adam \(keras\), and SGD \(keras\) cannot go on"):
                ud.load(path, model, optimizers.SGD(0.1))
            small = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(2)])
            with pytest.raises(CheckpointError, match="dense"):
                ud.load(path, small)
            with pytest.raises(UsageError, match="is not built"):
                ud.load(path, keras.Sequential([keras.layers.Dense(2)]))
            with pytest.raises(UsageError, match="give the model too"):
                ud.save(path, None, optimizer)
            with pytest.raises(UsageError, match="is no model of jax"):
                ud.save(path, {"a": 3})

    two.run(on_rank, (str(tmp_path / "run"),))


RATE, BETAS, EPSILON, DECAY = 2**-6, (0.875, 0.96875), 1e-12, 0.125  # which float32 has exactly, as Keras keeps them
FROM_TORCH: dict[str, Any] = {
    "sequential/dense/kernel": {"from": "0.weight", "permute": [1, 0]},
    "sequential/dense/bias": "0.bias",
    "sequential/dense_1/kernel": {"from": "2.weight", "permute": [1, 0]},
    "sequential/dense_1/bias": "2.bias",
}


def inputs(step: int) -> Any:
    return np.random.default_rng(step).normal(size=(8, 5))


def in_torch(path: str) -> list[float]:
    """Train without interruption, with a checkpoint after two updates; return the losses."""
    import torch

    import unidist.torch as hvd

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, BETAS, EPSILON, DECAY)
    hvd.init()
    losses = []
    for step in range(6):
        if step == 2:
            hvd.save(path, model, optimizer)
        given = torch.from_numpy(inputs(step))
        loss = (model(given).squeeze(1) - given.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    hvd.shutdown()
    return losses


def in_keras(loads: str, saves: str) -> list[float]:
    with runtime():
        layers = [keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(1)]
        model: Any = keras.Sequential([keras.Input((5,)), *layers])
        optimizer = optimizers.AdamW(0.5, DECAY, *BETAS, EPSILON)
        ud.load(loads, model, optimizer, mapping=FROM_TORCH)
        model.compile(optimizer, "mse")
        losses = [float(model.train_on_batch(inputs(step), inputs(step).sum(1, keepdims=True))) for step in (2, 3)]
        ud.save(saves, model, optimizer)
        return losses


def in_optax(loads: str) -> list[float]:
    with runtime():
        sizes = {"dense": (5, 7), "dense_1": (7, 1)}
        layers = {name: {"kernel": np.zeros(size), "bias": np.zeros(size[1])} for name, size in sizes.items()}

        def loss_fn(params: Any, x: Any) -> Any:
            first, second = params["sequential"]["dense"], params["sequential"]["dense_1"]
            hidden = jax.numpy.tanh(x @ first["kernel"] + first["bias"])
            return jax.numpy.mean(((hidden @ second["kernel"] + second["bias"])[:, 0] - x.sum(1)) ** 2)

        made = optax.adamw(RATE, *BETAS, EPSILON, weight_decay=DECAY)
        step = ud_jax.TrainStep(loss_fn, jax.tree.map(jax.numpy.asarray, {"sequential": layers}), made)
        ud_jax.load(loads, step)
        return [float(step(inputs(number))) for number in (4, 5)]


def test_torch_keras_and_optax_go_on_with_each_other(jax_pools: PartPools, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the training begins in PyTorch")
    alone = jax_pools.get(1)
    [wanted] = alone.run(in_torch, (str(tmp_path / "torch"),))
    [middle] = alone.run(in_keras, (str(tmp_path / "torch"), str(tmp_path / "keras")))
    [last] = alone.run(in_optax, (str(tmp_path / "keras"),))
    np.testing.assert_allclose([*middle, *last], wanted[2:], rtol=1e-6)


_ON_ANY_BACKEND = """
import sys, keras, numpy as np
import unidist.keras as ud

loads, saves, first = sys.argv[1:]
ud.init()
keras.config.set_floatx("float64")
keras.utils.set_random_seed(5)
hidden = keras.layers.Dense(7, use_bias=False)  # the gradient of a bias would be nothing but what was rounded
layers = [hidden, keras.layers.BatchNormalization(), keras.layers.Dropout(0.0), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((5,)), *layers])
optimizer = keras.optimizers.AdamW(0.015625, 0.125, 0.875, 0.96875, 1e-12, use_ema=True, ema_momentum=0.5)
model, optimizer = ud.distribute(model, optimizer)
model.compile(optimizer, "mse")
if loads:
    ud.load(loads, model, optimizer, rng=True)
for step in range(int(first), int(first) + 2):
    x = np.random.default_rng(step).normal(size=(8, 5))
    model.train_on_batch(x, x.sum(1, keepdims=True))
ud.save(saves, model, optimizer, rng=True)
np.savez(saves + ".npz", *model.get_weights())
"""


@pytest.mark.soak
def test_keras_goes_on_on_another_backend(tmp_path: Path) -> None:
    own = Path(sys.prefix)
    other = own.with_name(own.name.removesuffix("-jax")) / "bin" / "python"
    if other.parent.parent == own or not other.exists():
        pytest.skip("half of the training is on TensorFlow, and there is no environment with it beside this one")
    (tmp_path / "script.py").write_text(_ON_ANY_BACKEND)

    def run(backend: str, *arguments: str) -> None:
        python = sys.executable if backend == "jax" else str(other)
        line = [python, "script.py", *arguments]
        environment = {**os.environ, "KERAS_BACKEND": backend, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    run("jax", "", "begin", "0")
    run("tensorflow", "begin", "changed", "2")
    run("jax", "changed", "end", "4")
    run("jax", "begin", "alone", "2")
    run("jax", "alone", "wanted", "4")
    found, wanted = np.load(tmp_path / "end.npz"), np.load(tmp_path / "wanted.npz")
    for name in wanted.files:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-6)


def redistributes(strategy: str, path: str) -> None:
    """Train and redistribute; fail where the weights are others than those of a save and a load."""
    with set_variables({"UNIDIST_STRATEGY": strategy}), runtime():
        model, optimizer = ud.distribute(network(), optimizers.Adam(0.02))
        model.compile(optimizer, loss())
        for batch in batches(range(2)):
            model.train_on_batch(*batch)
        ud.save(path, model)
        loaded, taker, last = network(), network(), ud.size() - 1
        ud.load(path, loaded)
        assert ud.redistribute(model, to=taker) is None
        weights = ud.redistribute(model, to=[last])
        assert weights is None if ud.rank() != last else len(weights) == len(model.weights)
        for one, other, trained in zip(values(taker), values(loaded), values(model), strict=True):
            np.testing.assert_array_equal(one, other)
            np.testing.assert_array_equal(one, trained)
        given = network()
        given.set_weights([weight + 1 for weight in given.get_weights()])
        ud.redistribute(given if ud.rank() == last else None, to=model)
        ud.redistribute(model, to=loaded)
        if ud.rank() == last:
            for one, other in zip(values(loaded), values(given), strict=True):
                np.testing.assert_array_equal(one, other)
        for batch in batches(range(2, 4)):
            model.train_on_batch(*batch)


@pytest.mark.parametrize("strategy", ["data", "zero=1"])
def test_weights_for_other_ranks_are_those_of_a_save_and_a_load(
    jax_pools: PartPools, tmp_path: Path, strategy: str
) -> None:
    jax_pools.get(2, engine="shm").run(redistributes, (strategy, str(tmp_path / "trained")))
