"""Trainings whose batches are computed twice, for `test_replay`; on rank 1 a machine may be broken."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from unidist.settings import set_variables

STEPS, BAD_STEP = 5, 4
"""Steps of a training, and the one, from 1, in which rank 1 computes something else the second time."""


def _variables(strategy: str, verify: str) -> dict[str, str]:
    return {"UNIDIST_STRATEGY": strategy, "UNIDIST_VERIFY": verify}


def _batch(rank: int, step: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(10 * step + rank)
    return generator.standard_normal((4, 6)).astype(np.float32), generator.integers(0, 3, 4)


def torch_script(strategy: str, verify: str, broken: str = "") -> tuple[str, list[float], list[Any]]:
    """Train a model with dropout; return the text of the error, the losses and the parameters.

    Args:
        strategy: to train with.
        verify: what `--verify` says.
        broken: "forward" or "backward": there rank 1 gets other bits, in one pass of `BAD_STEP`.
    """
    import torch

    import unidist.torch as ud
    from unidist.errors import ReplayError

    class Machine(torch.nn.Module):
        """Returns its input; its last bit is another in one pass."""

        def __init__(self) -> None:
            super().__init__()
            self.passes = 0

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            if not self.fails():
                return values
            if broken == "forward":
                return values * (1 + 1e-3)
            if broken == "backward" and values.requires_grad:
                values.register_hook(lambda gradient: gradient * (1 + 1e-3))
            return values

        def fails(self) -> bool:
            return ud.rank() == 1 and self.passes == 3 * (BAD_STEP - 1) + 2  # two passes before each that counts

    with set_variables(_variables(strategy, verify)):
        ud.init()
        try:
            torch.manual_seed(3)
            layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)]
            if "pipeline" not in strategy and "tensor" not in strategy:
                layers[1:1] = [torch.nn.BatchNorm1d(8), Machine()]
            model: Any = torch.nn.Sequential(*layers)
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
            step = ud.TrainStep(model, optimizer, torch.nn.functional.cross_entropy)
            text, losses = "", []
            try:
                for number in range(STEPS):
                    shared = 0 if "pipeline" in strategy or "tensor" in strategy else ud.rank()
                    losses.append(float(step(*map(torch.from_numpy, _batch(shared, number)))))
            except ReplayError as exc:
                text = str(exc)
            return text, losses, [value.tolist() for value in step.model.state_dict().values()]
        finally:
            ud.shutdown()


def keras_script(verify: str, broken: bool = False) -> tuple[str, list[float]]:
    """Train a model with dropout and normalisation; return the text of the error, and the losses.

    Args:
        verify: what `--verify` says.
        broken: on rank 1 the loss of a batch is another each time.
    """
    import keras

    import unidist.keras as ud
    from unidist.errors import ReplayError

    with set_variables(_variables("data", verify)):
        ud.init()
        try:
            keras.utils.set_random_seed(3)
            layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
            model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
            loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            step = ud.TrainStep(model, keras.optimizers.Adam(0.05), loss_of)
            if broken and ud.rank() == 1:
                compute, passes = step._computed, itertools.count()
                step._computed = lambda batch: (next(passes), compute(batch)[1])
            text, losses = "", []
            try:
                for number in range(STEPS):
                    losses.append(float(step(*_batch(ud.rank(), number))))
            except ReplayError as exc:
                text = str(exc)
            return text, losses
        finally:
            ud.shutdown()


def jax_script(strategy: str, verify: str) -> list[float]:
    """Train; return the losses."""
    import jax
    import jax.numpy as jnp
    import optax

    import unidist.jax as ud

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        logits = jnp.tanh(x @ params["first"]) @ params["second"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    with set_variables(_variables(strategy, verify)):
        ud.init()
        try:
            first, second = jax.random.split(jax.random.key(3))
            params = {"first": jax.random.normal(first, (6, 8)), "second": jax.random.normal(second, (8, 3))}
            step = ud.TrainStep(loss_of, params, optax.adamw(0.05))
            return [float(step(*_batch(ud.rank(), number))) for number in range(STEPS)]
        finally:
            ud.shutdown()
