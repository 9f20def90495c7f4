"""PyTorch, JAX and Keras on JAX train the same weights to the same numbers, under each strategy that they have."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

jax = pytest.importorskip("jax", reason="the training is in JAX")
torch = pytest.importorskip("torch", reason="the training is in PyTorch, too")

import optax  # noqa: E402 - it needs JAX

import unidist.jax  # noqa: E402 - it needs JAX
import unidist.torch  # noqa: E402 - it needs PyTorch
from unidist.checkpoint import read_whole  # noqa: E402
from unidist.checkpoint.format.reader import Checkpoint  # noqa: E402
from unidist_arrays.memory import array_of_buffer  # noqa: E402

pytestmark = pytest.mark.parallel

Layers = list[dict[str, Any]]

SIZES, BATCH, UPDATES = (6, 8, 8, 3), 8, 10
RATE = 0.125  # Keras keeps it in float32
EPSILON = 1e-22  # Keras adds it at another place in Adam's formula

STRATEGIES = {
    "data": 1,
    "accumulate=2": 2,
    "clip_norm=0.05": 1,
    "clip_value=0.01": 1,
    "zero=1": 1,
    "zero=2,accumulate=2,clip_norm=0.05": 2,
    "zero=3": 1,
    "tensor=2:plan={}=column+{}=row": 1,
    "tensor=2:plan={}=column+{}=row,clip_norm=0.05": 1,
    "pipeline=2:microbatches=2": 1,
    "pipeline=2:microbatches=2,clip_norm=0.05": 1,
}
"""Each with the number of passes that make an update. A plan names the first two layers."""

OF_KERAS = [name for name in STRATEGIES if not name.startswith(("zero=3", "tensor", "pipeline"))]


CASES = [*((name, "sgd") for name in STRATEGIES), *((name, "adamw") for name in ("data", "zero=1", "zero=3"))]
OFTEN = {
    ("data", "sgd"),
    ("data", "adamw"),
    ("zero=2,accumulate=2,clip_norm=0.05", "sgd"),
    ("zero=3", "adamw"),
    ("tensor=2:plan={}=column+{}=row,clip_norm=0.05", "sgd"),
    ("pipeline=2:microbatches=2,clip_norm=0.05", "sgd"),
}
"""The others are in `make soak`."""


def _cases() -> list[Any]:
    return [pytest.param(*case, marks=() if case in OFTEN else pytest.mark.soak) for case in CASES]


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return jax_pools


@pytest.mark.parametrize(("strategy", "optimizer"), _cases())
def test_ten_updates_are_the_same(jax_pools: PartPools, tmp_path: Path, strategy: str, optimizer: str) -> None:
    jax_pools.get(2, engine="shm").run(compare, (strategy, optimizer, tmp_path / "weights"))


def compare(strategy: str, optimizer: str, folder: Path) -> None:
    batches = UPDATES * STRATEGIES[strategy]
    of_torch = train_torch(strategy.format("0", "2"), optimizer, batches, folder)
    check(of_torch, train_jax(strategy.format("0", "1"), optimizer, batches))
    if strategy in OF_KERAS:
        check(of_torch, train_keras(strategy, optimizer, batches))


def check(found: Layers, wanted: Layers) -> None:
    for one, other, first in zip(found, wanted, weights(), strict=True):
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-10, atol=1e-12)
            assert np.abs(one[name] - first[name]).max() > 1e-4


def weights() -> Layers:
    generator = np.random.default_rng(0)
    return [
        {"kernel": 0.5 * generator.standard_normal((rows, columns)), "bias": 0.1 * generator.standard_normal(columns)}
        for rows, columns in itertools.pairwise(SIZES)
    ]


def share(ud: Any, number: int) -> tuple[Any, Any]:
    """Return this rank's share of a batch."""
    generator = np.random.default_rng(100 + number)
    x, y = generator.standard_normal((BATCH, SIZES[0])), generator.integers(0, SIZES[-1], BATCH)
    return x[ud.data_rank() :: ud.data_size()], y[ud.data_rank() :: ud.data_size()]


def train_torch(strategy: str, optimizer: str, batches: int, folder: Path) -> Layers:
    ud = unidist.torch
    ud.init()
    model = torch.nn.Sequential()
    for layer in weights():
        linear = torch.nn.Linear(*layer["kernel"].shape, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(layer["kernel"].T))
            linear.bias.copy_(torch.from_numpy(layer["bias"]))
        model.extend([linear, torch.nn.ReLU()])
    if optimizer == "sgd":
        inner: Any = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=RATE / 8, weight_decay=0.125, eps=EPSILON)
    step = ud.TrainStep(model, inner, torch.nn.CrossEntropyLoss(), strategy=strategy)
    for number in range(batches):
        x, y = share(ud, number)
        step(torch.from_numpy(x), torch.from_numpy(y))
    found = whole_of_torch(ud, step.model, folder)
    ud.shutdown()
    return found


def whole_of_torch(ud: Any, model: Any, folder: Path) -> Layers:
    """Return the weights of a model, of which each rank may have a part, by way of a checkpoint."""
    ud.save(folder, model)
    with Checkpoint(folder) as opened:
        section = opened.section("model")
        found = {
            name: array_of_buffer(read_whole(section, info), info.shape).copy()
            for name, info in section.tensors.items()
        }
    return [{"kernel": found[f"{2 * i}.weight"].T, "bias": found[f"{2 * i}.bias"]} for i in range(len(SIZES) - 1)]


def train_jax(strategy: str, optimizer: str, batches: int) -> Layers:
    ud = unidist.jax
    ud.init()

    def loss_fn(params: Layers, x: Any, y: Any) -> Any:
        for layer in params:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()

    inner = (
        optax.sgd(RATE, momentum=0.9) if optimizer == "sgd" else optax.adamw(RATE / 8, weight_decay=0.125, eps=EPSILON)
    )
    params = jax.tree.map(jax.numpy.asarray, weights())
    step = ud.TrainStep(loss_fn, params, inner, strategy=strategy)
    for number in range(batches):
        step(*share(ud, number))
    found: Layers = jax.tree.map(np.asarray, step.params)
    ud.shutdown()
    return found


def train_keras(strategy: str, optimizer: str, batches: int) -> Layers:
    import keras

    import unidist.keras as ud

    keras.config.set_floatx("float64")
    ud.init()
    model = keras.Sequential(
        [keras.Input(SIZES[:1]), *(keras.layers.Dense(width, activation="relu") for width in SIZES[1:])]
    )
    model.set_weights([layer[name] for layer in weights() for name in ("kernel", "bias")])
    if optimizer == "sgd":
        inner: Any = keras.optimizers.SGD(RATE, momentum=0.9)
    else:
        inner = keras.optimizers.AdamW(RATE / 8, weight_decay=0.125, epsilon=EPSILON)
    model, inner = ud.distribute(model, inner, strategy=strategy)
    model.compile(inner, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for number in range(batches):
        model.train_on_batch(*share(ud, number))
    arrays = iter(model.get_weights())
    found = [{"kernel": next(arrays), "bias": next(arrays)} for _ in SIZES[1:]]
    ud.shutdown()
    keras.config.set_floatx("float32")
    return found
