"""Checkpoints of Keras models and optimizers, in one process, and those of PyTorch that Keras goes on with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import unidist.keras as ud
from unidist.checkpoint.format.index import Index
from unidist.errors import CheckpointError, UsageError


@pytest.fixture(autouse=True)
def _runtime() -> Iterator[None]:
    ud.init()
    yield
    ud.shutdown()


def make(seed: int, *, width: int = 6) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="float64"),
            keras.layers.Dense(width, activation="tanh", dtype="float64"),
            keras.layers.BatchNormalization(dtype="float64"),
            keras.layers.Dense(1, dtype="float64"),
        ]
    )
    model.layers[1].trainable = False  # and its moving averages are weights that are not trainable
    return model


def batch(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(8, 5))


def train(model: Any, optimizer: Any, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        inputs = tf.constant(batch(step))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.squeeze(model(inputs), 1) - tf.reduce_sum(inputs, 1)) ** 2)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        losses.append(float(loss))
    return losses


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {}),
    ("Adam", {"amsgrad": True}),
    ("Nadam", {}),
    ("Adagrad", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Adafactor", {}),
    ("AdamW", {"use_ema": True}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_training_goes_on_bit_by_bit(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    model, optimizer = make(0), getattr(keras.optimizers, kind)(0.05, **options)
    train(model, optimizer, 0, 3)
    optimizer.learning_rate = 0.02
    ud.save(tmp_path / "c", model, optimizer)
    expected = train(model, optimizer, 3, 2)
    again, other = make(9), getattr(keras.optimizers, kind)(0.05, **options)
    ud.load(tmp_path / "c", again, other)
    assert train(again, other, 3, 2) == expected
    assert int(other.iterations) == 5
    for first, second in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_loss_scale_goes_on_where_it_was(tmp_path: Path) -> None:
    model = make(0)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64.0)
    train(model, optimizer, 0, 2)
    ud.save(tmp_path / "c", model, optimizer)
    again = make(1)
    other = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=8.0)
    ud.load(tmp_path / "c", again, other)
    assert float(other.dynamic_scale) == float(optimizer.dynamic_scale) == 64.0
    assert train(again, other, 2, 2) == train(model, optimizer, 2, 2)


def test_layers_have_the_same_names_in_every_process(tmp_path: Path) -> None:
    for name in ("a", "b"):  # Keras goes on counting: the second model's layers have other names
        ud.save(tmp_path / name, make(0))
    names = [list(Index.read(tmp_path / name).sections["model"].tensors) for name in ("a", "b")]
    assert names[0] == names[1]
    assert "sequential/dense_1/kernel" in names[0]


def test_a_save_before_the_first_step_changes_nothing_and_loads(tmp_path: Path) -> None:
    model, optimizer = make(0), keras.optimizers.Adagrad(0.1)
    before = [each.numpy() for each in model.weights]
    ud.save(tmp_path / "c", model, optimizer)
    assert not optimizer.built
    expected = train(model, optimizer, 0, 2)
    assert expected == train(make(0), keras.optimizers.Adagrad(0.1), 0, 2)
    ud.load(tmp_path / "c", model, optimizer)  # back to before the first step
    assert int(optimizer.iterations) == 0
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight, value)
    assert train(model, optimizer, 0, 2) == expected


def test_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    ud.save(tmp_path / "c", make(0))
    with pytest.raises(CheckpointError) as caught:
        ud.load(tmp_path / "c", make(0, width=7))
    assert "'sequential/dense/kernel' float64[5, 6], here [5, 7]" in str(caught.value)
    with pytest.raises(UsageError, match="is not built"):
        ud.load(tmp_path / "c", keras.Sequential([keras.layers.Dense(2)]))
    model, optimizer = make(0), keras.optimizers.Adam()
    ud.save(tmp_path / "d", model, optimizer)
    with pytest.raises(CheckpointError, match=r"saved by Adam \(keras\), and SGD \(keras\) cannot go on"):
        ud.load(tmp_path / "d", model, keras.optimizers.SGD())


def test_seeds_of_layers_come_back_with_the_random_generators(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dropout(0.5, seed=3)])
    ud.save(tmp_path / "c", model, rng=True, extra={"x": tf.constant([1.5])})
    first = model(np.ones((1, 20)), training=True).numpy()
    second = model(np.ones((1, 20)), training=True).numpy()
    assert (first != second).any()
    loaded = ud.load(tmp_path / "c", model, rng=True)
    np.testing.assert_array_equal(model(np.ones((1, 20)), training=True), first)
    np.testing.assert_array_equal(loaded.extra["x"], [1.5])


MAPPING = {
    "sequential/dense/kernel": {"from": "0.weight", "permute": [1, 0]},
    "sequential/dense/bias": "0.bias",
    "sequential/dense_1/kernel": {"from": "2.weight", "permute": [1, 0]},
    "sequential/dense_1/bias": "2.bias",
}


class TestBetweenFrameworks:
    """Options that float32 has exactly: Keras rounds them to it, whatever the type of the weights."""

    @pytest.fixture(autouse=True)
    def _needs_torch(self) -> None:
        pytest.importorskip("torch")

    def train_torch(self, model: Any, optimizer: Any, first: int, steps: int) -> list[float]:
        import torch

        losses = []
        for step in range(first, first + steps):
            inputs = torch.from_numpy(batch(step))
            loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def make_torch(self, seed: int) -> Any:
        import torch

        torch.set_num_threads(1)  # the machine may be busy
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()

    def make_keras(self) -> Any:
        return keras.Sequential(
            [
                keras.Input((5,), dtype="float64"),
                keras.layers.Dense(6, activation="tanh", dtype="float64"),
                keras.layers.Dense(1, dtype="float64"),
            ]
        )

    @pytest.mark.parametrize(
        ("kind", "in_torch", "in_keras"),
        [
            (
                "AdamW",
                {"betas": (0.875, 0.96875), "eps": 1e-12, "weight_decay": 0.125},
                {"beta_1": 0.875, "beta_2": 0.96875, "epsilon": 1e-12, "weight_decay": 0.125},
            ),
            ("SGD", {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "nesterov": True}),
            ("RMSprop", {"momentum": 0.5, "alpha": 0.9, "eps": 1e-12}, {"momentum": 0.5, "rho": 0.9, "epsilon": 1e-24}),
        ],
    )
    def test_each_goes_on_where_the_other_stopped(
        self, tmp_path: Path, kind: str, in_torch: dict[str, Any], in_keras: dict[str, Any]
    ) -> None:
        import torch

        import unidist.torch as torch_ud

        model = self.make_torch(0)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=2**-6, **in_torch)
        self.train_torch(model, optimizer, 0, 4)
        torch_ud.save(tmp_path / "torch", model, optimizer)
        expected = self.train_torch(model, optimizer, 4, 8)

        there, its_optimizer = self.make_keras(), getattr(keras.optimizers, kind)(0.5, **in_keras)
        ud.load(tmp_path / "torch", there, its_optimizer, mapping=MAPPING)
        np.testing.assert_allclose(train(there, its_optimizer, 4, 4), expected[:4], rtol=1e-6)
        ud.save(tmp_path / "keras", there, its_optimizer)

        back = self.make_torch(5)
        its_optimizer = getattr(torch.optim, kind)(back.parameters(), lr=0.5, **in_torch)
        mapping = {
            value["from"] if isinstance(value, dict) else value: {**value, "from": path}
            if isinstance(value, dict)
            else path
            for path, value in MAPPING.items()
        }
        torch_ud.load(tmp_path / "keras", back, its_optimizer, mapping=mapping)
        np.testing.assert_allclose(self.train_torch(back, its_optimizer, 8, 4), expected[4:], rtol=1e-6)

    def test_muon_beside_adamw_becomes_kerass_muon(self, tmp_path: Path) -> None:
        """Both ways and with optax: tests/adapters/unidist_jax/checkpoint/test_several_families.py."""
        import torch

        import unidist.torch as torch_ud

        model = self.make_torch(0)
        muon = torch.optim.Muon([model[0].weight, model[2].weight], lr=0.04)
        adamw = torch.optim.AdamW([model[0].bias, model[2].bias], lr=0.02)
        for step in range(3):
            self.train_torch(model, muon, step, 1)
            adamw.step()
        torch_ud.save(tmp_path / "run", model, {"muon": muon, "adamw": adamw})
        there, optimizer = self.make_keras(), keras.optimizers.Muon(0.5, adam_lr_ratio=0.5, momentum=0.75)
        ud.load(tmp_path / "run", there, optimizer, mapping=MAPPING)
        sums = muon.state[model[0].weight]["momentum_buffer"].numpy().T * 4.0  # 1 / (1 - momentum)
        np.testing.assert_array_equal(optimizer.momentums[0], sums)
        bias = adamw.state[model[0].bias]
        np.testing.assert_array_equal(optimizer.momentums[1], bias["exp_avg"])
        np.testing.assert_array_equal(optimizer.adam_velocities[1], bias["exp_avg_sq"])
        assert optimizer.adam_velocities[0] is None
        assert int(optimizer.iterations) == 3
        floatx = keras.config.floatx()
        keras.config.set_floatx("float64")  # Keras' Muon steps on variables of the default type alone
        try:
            assert np.isfinite(train(there, optimizer, 4, 2)).all()
        finally:
            keras.config.set_floatx(floatx)

    def test_without_the_optimizer_state_it_would_not_go_on(self, tmp_path: Path) -> None:
        """The comparison above sees state that was lost."""
        import torch

        import unidist.torch as torch_ud

        model = self.make_torch(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        self.train_torch(model, optimizer, 0, 4)
        torch_ud.save(tmp_path / "torch", model, optimizer)
        expected = self.train_torch(model, optimizer, 4, 4)
        there = self.make_keras()
        ud.load(tmp_path / "torch", there, mapping=MAPPING)
        continued = train(there, keras.optimizers.SGD(0.02, momentum=0.9), 4, 4)
        np.testing.assert_allclose(continued[:1], expected[:1], rtol=1e-6)
        assert np.abs(np.array(continued[2:]) - expected[2:]).min() > 1e-4
