"""What JAX has trained goes on in PyTorch and Keras, optimizer state included, and the other way round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _programs import runtime
from part_pools import PartPools

import unidist.jax as ud
from unidist.errors import CheckpointError
from unidist.settings.environment import set_variables

pytestmark = pytest.mark.parallel

BATCH, STEPS = 12, 3
RATE, BETAS, EPSILON, DECAY = 2**-6, (0.875, 0.96875), 1e-12, 0.125  # which float32 has exactly, as Keras keeps them
TO_TORCH: dict[str, Any] = {
    "0.weight": {"from": "first/w", "permute": [1, 0]},
    "0.bias": "first/b",
    "2.weight": {"from": "second/w", "permute": [1, 0]},
    "2.bias": "second/b",
}
FROM_TORCH: dict[str, Any] = {
    "first/w": {"from": "0.weight", "permute": [1, 0]},
    "first/b": "0.bias",
    "second/w": {"from": "2.weight", "permute": [1, 0]},
    "second/b": "2.bias",
}
FROM_KERAS: dict[str, Any] = {
    "first/w": "sequential/dense/kernel",
    "first/b": "sequential/dense/bias",
    "second/w": "sequential/dense_1/kernel",
    "second/b": "sequential/dense_1/bias",
}
TO_KERAS = {theirs: ours for ours, theirs in FROM_KERAS.items()}

OPTAX: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(RATE, *BETAS, EPSILON, weight_decay=DECAY),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(0.5, *BETAS, EPSILON, weight_decay=DECAY),
    "momentum": lambda: optax.sgd(RATE, momentum=0.875),
    "nesterov": lambda: optax.sgd(RATE, momentum=0.875, nesterov=True),
    "rmsprop": lambda: optax.rmsprop(RATE, 0.875, EPSILON, eps_in_sqrt=False),
    "adagrad": lambda: optax.adagrad(RATE, initial_accumulator_value=0.0, eps=0.0),
}


def fresh(seed: int) -> Any:
    generator = np.random.default_rng(seed)

    def layer(rows: int, columns: int) -> Any:
        return {"w": jnp.asarray(generator.standard_normal((rows, columns))), "b": jnp.zeros(columns)}

    return {"first": layer(5, 7), "second": layer(7, 1)}


def batch(step: int) -> Any:
    return np.random.default_rng(step).normal(size=(BATCH, 5))


def loss_fn(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    out = hidden @ params["second"]["w"] + params["second"]["b"]
    return jnp.mean((out[:, 0] - x.sum(1)) ** 2)


def in_jax(
    optimizer: str, strategy: str, loads: str, mapping: Any, saves: str, first: int, steps: int = STEPS
) -> list[float]:
    """Train in JAX; return the losses over whole batches."""
    with set_variables({"UNIDIST_STRATEGY": strategy}), runtime():
        step = ud.TrainStep(loss_fn, fresh(99 if loads else 0), OPTAX[optimizer]())
        if loads:
            ud.load(loads, step, mapping=mapping)
        losses = [float(step(batch(number)[ud.rank() :: ud.size()])) for number in range(first, first + steps)]
        if saves:
            ud.save(saves, step)
        return losses


def in_torch(optimizer: str, strategy: str, loads: str, saves: str, first: int) -> list[float]:
    """Go on in PyTorch; return the losses over whole batches."""
    import torch

    import unidist.torch as hvd

    made: dict[str, Callable[[Any], Any]] = {
        "adamw": lambda each: torch.optim.AdamW(each, RATE, BETAS, EPSILON, DECAY),
        "injected": lambda each: torch.optim.AdamW(each, RATE, BETAS, EPSILON, DECAY),
        "momentum": lambda each: torch.optim.SGD(each, RATE, momentum=0.875),
        "nesterov": lambda each: torch.optim.SGD(each, RATE, momentum=0.875, nesterov=True),
        "rmsprop": lambda each: torch.optim.RMSprop(each, RATE, 0.875, EPSILON),
        "adagrad": lambda each: torch.optim.Adagrad(each, RATE, eps=1e-300),
    }
    with set_variables({"UNIDIST_STRATEGY": strategy}):
        hvd.init()
        try:
            model: Any = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
            model, bound = hvd.distribute(model, made[optimizer](model.parameters()))
            hvd.load(loads, model, bound, mapping=TO_TORCH)
            losses = []
            for number in range(first, first + STEPS):
                inputs = torch.from_numpy(batch(number)[hvd.rank() :: hvd.size()].copy())
                bound.zero_grad()
                loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
                loss.backward()
                bound.step()
                losses.append(float(hvd.allreduce(loss.detach(), name="loss")))
            hvd.save(saves, model, bound)
            return losses
        finally:
            hvd.shutdown()


@pytest.mark.parametrize(
    ("optimizer", "begins", "between", "ends"),
    [
        ("adamw", ("data", 2), ("data", 1), ("data", 2)),
        ("adamw", ("zero=2", 3), ("zero=1", 2), ("zero=1", 2)),
        ("adamw", ("zero=1", 2), ("zero=3:shared=false", 2), ("data", 1)),
        ("injected", ("data", 1), ("data", 1), ("data", 1)),
        ("momentum", ("zero=1", 2), ("zero=1", 3), ("data", 1)),
        ("nesterov", ("data", 1), ("data", 2), ("zero=1", 2)),
        ("rmsprop", ("data", 1), ("data", 1), ("data", 1)),
        ("adagrad", ("data", 1), ("data", 1), ("data", 1)),
    ],
)
def test_jax_and_torch_go_on_with_each_other_to_the_last_bits(
    jax_pools: PartPools,
    tmp_path: Path,
    optimizer: str,
    begins: tuple[str, int],
    between: tuple[str, int],
    ends: tuple[str, int],
) -> None:
    pytest.importorskip("torch", reason="half of the training is in PyTorch")
    own = "adamw" if optimizer == "injected" else optimizer
    [wanted] = jax_pools.get(1).run(in_jax, (own, "data", "", None, "", 0, 3 * STEPS))
    paths = [str(tmp_path / name) for name in ("first", "second", "third")]
    found = jax_pools.get(begins[1], engine="shm").run(in_jax, (own, begins[0], "", None, paths[0], 0))
    middle = jax_pools.get(between[1], engine="shm").run(in_torch, (optimizer, between[0], paths[0], paths[1], STEPS))
    end = jax_pools.get(ends[1], engine="shm").run(
        in_jax, (optimizer, ends[0], paths[1], FROM_TORCH, paths[2], 2 * STEPS)
    )
    for part, losses in enumerate((found, middle, end)):
        for each in losses:
            np.testing.assert_allclose(each, wanted[part * STEPS : (part + 1) * STEPS], rtol=1e-12)


def test_momentum_in_units_of_a_learning_rate_that_was_not_saved_is_an_error(
    jax_pools: PartPools, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch", reason="half of the training is in PyTorch")

    def on_rank(path: str) -> None:
        import unidist.torch as hvd

        with runtime():
            params = {"weight": jnp.ones((1, 3))}
            optimizer = optax.rmsprop(0.1, momentum=0.9)
            ud.save(path, params, optimizer.init(params))
            model = torch.nn.Linear(3, 1, bias=False).double()
            with pytest.raises(CheckpointError, match="differs from that of torch by the learning rate"):
                hvd.load(path, model, torch.optim.RMSprop(model.parameters(), momentum=0.9))

            other = torch.optim.RMSprop(model.parameters(), 0.5, momentum=0.9)
            model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
            other.step()
            hvd.save(path, model, other)
            loaded = ud.load(path, params, optimizer.init(params))
            buffer = other.state[model.weight]["momentum_buffer"].numpy()
            np.testing.assert_allclose(loaded.opt_state[2].trace["weight"], -0.5 * buffer, rtol=1e-15)

    jax_pools.get(1).run(on_rank, (str(tmp_path / "run"),))


def test_what_a_wrapper_keeps_is_left_out_in_another_framework(jax_pools: PartPools, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="half of the training is in PyTorch")

    def on_rank(path: str) -> None:
        import unidist.torch as hvd

        with runtime():
            params = {"weight": jnp.ones((1, 3))}
            optimizer = optax.MultiSteps(optax.adam(0.1), 2)
            state = optimizer.init(params)
            for _ in range(3):
                _, state = optimizer.update(params, state, params)
            ud.save(path, params, state)
            model = torch.nn.Linear(3, 1, bias=False).double()
            other = torch.optim.Adam(model.parameters(), 0.25)
            hvd.load(path, model, other)
            kept = other.state[model.weight]
            assert sorted(kept) == ["exp_avg", "exp_avg_sq", "step"]
            assert kept["step"].item() == 1
            assert other.param_groups[0]["lr"] == 0.25  # the script's: optax keeps none
            hvd.save(path, model, other)
            loaded = ud.load(path, params, optimizer.init(params))
            assert loaded.opt_state.inner_opt_state[0].count == 1
            np.testing.assert_array_equal(loaded.opt_state.inner_opt_state[0].mu["weight"], kept["exp_avg"].numpy())

    jax_pools.get(1).run(on_rank, (str(tmp_path / "run"),))


KERAS = """
import json, sys
import keras, numpy as np, tensorflow as tf
import unidist.keras as ud

optimizer, loads, saves, mapping, first, steps = json.loads(sys.argv[1])
RATE, BETAS, EPSILON, DECAY = 2**-6, (0.875, 0.96875), 1e-12, 0.125
ud.init()
keras.utils.set_random_seed(3)
model = keras.Sequential([
    keras.Input((5,), dtype="float64"),
    keras.layers.Dense(7, activation="tanh", dtype="float64"),
    keras.layers.Dense(1, dtype="float64"),
])
made = {
    "adamw": lambda: keras.optimizers.AdamW(RATE, DECAY, *BETAS, EPSILON),
    "momentum": lambda: keras.optimizers.SGD(RATE, momentum=0.875),
}[optimizer]()
if loads:
    ud.load(loads, model, made, mapping=mapping)
losses = []
for step in range(first, first + steps):
    inputs = tf.constant(np.random.default_rng(step).normal(size=(12, 5)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.squeeze(model(inputs), 1) - tf.reduce_sum(inputs, 1)) ** 2)
    losses.append(float(loss))
    made.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
ud.save(saves, model, made)
print("losses", json.dumps(losses))
"""


def in_keras(folder: Path, *arguments: Any) -> list[float]:
    """Train in Keras on TensorFlow, in the environment that has it; return the losses."""
    python = Path(sys.prefix).with_name(Path(sys.prefix).name.removesuffix("-jax")) / "bin" / "python"
    if not python.exists():
        pytest.skip("the training is in Keras, and there is no environment with TensorFlow beside this one")
    (folder / "keras_script.py").write_text(KERAS)
    line = [str(python), "keras_script.py", json.dumps(arguments)]
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    if "No module named 'tensorflow'" in done.stderr:
        pytest.skip("the training is in Keras on TensorFlow")
    assert done.returncode == 0, done.stderr
    [told] = [line for line in done.stdout.splitlines() if line.startswith("losses ")]
    losses: list[float] = json.loads(told.removeprefix("losses "))
    return losses


@pytest.mark.parametrize(("optimizer", "strategy"), [("adamw", "zero=1"), ("momentum", "data")])
def test_jax_and_keras_go_on_with_each_other(
    jax_pools: PartPools, tmp_path: Path, optimizer: str, strategy: str
) -> None:
    [wanted] = jax_pools.get(1).run(in_jax, (optimizer, "data", "", None, "", 0, 3 * STEPS))
    paths = [str(tmp_path / name) for name in ("first", "second", "third")]
    jax_pools.get(2, engine="shm").run(in_jax, (optimizer, strategy, "", None, paths[0], 0))
    middle = in_keras(tmp_path, optimizer, paths[0], paths[1], TO_KERAS, STEPS, STEPS)
    np.testing.assert_allclose(middle, wanted[STEPS : 2 * STEPS], rtol=1e-6)
    for losses in jax_pools.get(2, engine="shm").run(
        in_jax, (optimizer, strategy, paths[1], FROM_KERAS, paths[2], 2 * STEPS)
    ):
        np.testing.assert_allclose(losses, wanted[2 * STEPS :], rtol=1e-6)
