"""What ranks that compute cut layers see when one of them cannot go on. Run on the ranks of a pool.

Frameworks are imported in here, so that a process can be forked before: TensorFlow does not survive that.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from unidist.runtime import context
from unidist.settings.environment import set_variables

VICTIM, WIDTH, STEPS, CALL = 1, 4, 4, 2
Outcome = tuple[str, str]


def fail() -> None:
    """Raise what a script might."""
    raise ValueError("no such word")


def die() -> None:
    """End this process, as a machine that is switched off."""
    os.kill(os.getpid(), signal.SIGKILL)


SURPRISES: dict[str, Callable[[], None]] = {"raises": fail, "dies": die}


def train(framework: str, engine: str, kind: str, moment: str) -> Outcome:
    """Train cut layers, between which something happens on one rank; returns the type and the text of the error.

    Args:
        framework: "torch" or "keras".
        engine: carries everything.
        kind: what happens, of `SURPRISES`.
        moment: the pass in which it does, "forward" or "backward".
    """
    calls: list[None] = []

    def surprise() -> None:
        calls.append(None)
        if len(calls) == CALL and int(os.environ["UNIDIST_RANK"]) == VICTIM:
            SURPRISES[kind]()

    strategy = f"tensor={os.environ['UNIDIST_WORLD_SIZE']}"
    with set_variables({"UNIDIST_ENGINE": engine, "UNIDIST_STRATEGY": strategy, "UNIDIST_TIMEOUT_SEC": "60"}):
        try:
            {"torch": _train_torch, "keras": _train_keras}[framework](surprise, moment)
        except Exception as error:
            return type(error).__name__, str(error)
    return "nothing", ""


def train_or_die(framework: str, engine: str, moment: str, rank: int) -> Outcome:
    """Train; the process of one rank is killed: a child of the pool's process stands in for it."""
    if rank != VICTIM:
        return train(framework, engine, "dies", moment)
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            train(framework, engine, "dies", moment)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    next(context._epochs)  # of the runtime that the child had in place of this process: the ranks count them alike
    return "died", str(os.WTERMSIG(status) if os.WIFSIGNALED(status) else status)


def _train_torch(surprise: Callable[[], None], moment: str) -> None:
    import torch

    import unidist.torch as ud

    torch.set_num_threads(1)

    def watch(module: Any, args: tuple[torch.Tensor]) -> None:
        if moment == "forward":
            surprise()
        else:
            args[0].register_hook(lambda gradient: surprise())

    ud.init()
    try:
        layers = [torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)] * 2
        model = torch.nn.Sequential(*(type(each)(each.in_features, each.out_features) for each in layers))
        step = ud.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)
        step.model[3].register_forward_pre_hook(watch)
        inputs = torch.ones(2, WIDTH)
        for _ in range(STEPS):
            step(inputs, inputs)
    finally:
        ud.shutdown()


def _train_keras(surprise: Callable[[], None], moment: str) -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    import unidist.keras as ud

    def node(values: Any) -> Any:
        def run(array: Any) -> Any:
            surprise()
            return array

        return tf.ensure_shape(tf.numpy_function(run, [values], values.dtype), values.shape)

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def watched(values: Any) -> Any:
        if moment == "forward":
            return node(values), lambda gradient: gradient
        return tf.identity(values), node

    class Watched(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
        def call(self, x: Any) -> Any:
            return watched(x)

    ud.init()
    try:
        start = keras.Input((WIDTH,))
        dense = keras.layers.Dense
        x = Watched()(dense(WIDTH)(dense(2 * WIDTH)(start)))
        model = keras.Model(start, dense(WIDTH)(dense(2 * WIDTH)(x)))
        step = ud.TrainStep(model, keras.optimizers.SGD(), keras.losses.MeanSquaredError())
        inputs = np.ones((2, WIDTH), "float32")
        for _ in range(STEPS):
            step(inputs, inputs)
    finally:
        ud.shutdown()


def check_others(outcomes: list[Outcome], *, named: bool = True) -> None:
    """Check that all ranks but the victim have lost it, and say which one it was."""
    for rank, (kind, text) in enumerate(outcomes):
        if rank != VICTIM:
            assert kind in ("PeerLostError", "PeerLostOpError"), text
            assert f"rank {VICTIM}" in text or not named
