"""Trainings under `parameter_server` with optax on ranks, and the same by trees in one process."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from local_sgd_jax import OPTIMIZERS, batch_of, loss_fn, parameters

import unidist.jax as ud
from unidist.errors import UnidistError
from unidist.settings.environment import set_variables
from unidist_parameter_server._jax.pushing import PushedLeaves
from unidist_parameter_server.jax import pull, synchronize

STEPS = 7


def _constant(params: Any, factor: Any) -> Any:
    """Return a loss whose gradient is `factor` everywhere."""
    return factor * sum(jnp.sum(leaf) for leaf in params.values())


def train(line: str, optimizer: str, mode: str, *, is_constant: bool = False) -> tuple[Any, list[float]]:
    """Train on this rank; return the parameters after all ranks have taken those of the store, and the losses."""
    with set_variables({"UNIDIST_STRATEGY": line}):
        ud.init()
        try:
            batches: list[Any] = [batch_of(number, ud.rank()) for number in range(STEPS)]
            loss: Any = loss_fn
            if is_constant:
                loss, batches = _constant, [(np.float64(ud.rank() + 1),)] * STEPS
            losses = []
            if mode == "step":
                step = ud.TrainStep(loss, parameters(), OPTIMIZERS[optimizer]())
                losses = [float(step(*batch)) for batch in batches]
                assert pull(step)
                assert synchronize(step)
                return jax.tree.map(np.array, step.params), losses
            params, bound = ud.distribute(parameters(), OPTIMIZERS[optimizer]())
            state = bound.init(params)

            def update(params: Any, state: Any, *batch: Any) -> tuple[Any, Any]:
                updates, state = bound.update(jax.grad(loss)(params, *batch), state, params)
                return optax.apply_updates(params, updates), state

            run = jax.jit(update) if mode == "jit" else update
            for batch in batches:
                params, state = run(params, state, *map(jnp.asarray, batch))
            params, state = synchronize(bound, pull(bound, params), state)
            return jax.tree.map(np.array, params), losses
        finally:
            ud.shutdown()


def simulate(optimizer: str, size: int) -> Any:
    """Return the parameters after steps in which the mean of the ranks' own updates is added."""
    inner = OPTIMIZERS[optimizer]()
    params = parameters()
    states = [inner.init(params) for _ in range(size)]
    for number in range(STEPS):
        updates = []
        for rank in range(size):
            found, states[rank] = inner.update(jax.grad(loss_fn)(params, *batch_of(number, rank)), states[rank], params)
            updates.append(found)
        params = optax.apply_updates(params, jax.tree.map(lambda *each: sum(each) / size, *updates))
    return jax.tree.map(np.array, params)


def constant_result(size: int) -> Any:
    """Return the parameters after the steps of all ranks with constant gradients, by SGD, in any order."""
    moved = 0.05 / size * STEPS * sum(range(1, size + 1))
    return {name: np.array(value) - moved for name, value in parameters().items()}


def evaluated_after_pushes_of_the_other() -> tuple[float, bool]:
    """Return this rank's evaluation of one batch after rank 1 has made more steps, and whether it moved parameters."""
    with set_variables({"UNIDIST_STRATEGY": "parameter_server=async:push=delta"}):
        ud.init()
        try:
            step = ud.TrainStep(loss_fn, parameters(), OPTIMIZERS["sgd"]())
            step(*batch_of(0, 0))
            ud.barrier()
            for _ in range(5 if ud.rank() == 1 else 0):
                step(*batch_of(0, 0))
            ud.barrier()
            before = step.params
            loss = float(step.evaluate(*batch_of(0, 0)))
            moved = any(
                bool((old != new).any()) for old, new in zip(*map(jax.tree.leaves, (before, step.params)), strict=True)
            )
            alone = float(loss_fn(step.params, *batch_of(0, 0)))
            np.testing.assert_allclose(loss, alone, rtol=1e-12)
            return loss, moved
        finally:
            ud.shutdown()


def synchronized_right_after_a_slow_step() -> Any:
    """Return the parameters that a rank has when it synchronizes while the program of its first step still runs."""
    push = PushedLeaves.step

    def slow_push(self: PushedLeaves, *arrays: Any) -> None:
        time.sleep(0.3)
        push(self, *arrays)

    with (
        set_variables({"UNIDIST_STRATEGY": "parameter_server=sync:push=delta"}),
        mock.patch.object(PushedLeaves, "step", slow_push),
    ):
        ud.init()
        try:
            params, bound = ud.distribute(parameters(), OPTIMIZERS["sgd"]())

            @jax.jit
            def run(params: Any, state: Any, *batch: Any) -> tuple[Any, Any]:
                updates, state = bound.update(jax.grad(loss_fn)(params, *batch), state, params)
                return optax.apply_updates(params, updates), state

            before, state = params, bound.init(params)
            run.lower(params, state, *map(jnp.asarray, batch_of(0, ud.rank()))).compile()
            run(params, state, *map(jnp.asarray, batch_of(0, ud.rank())))
            params, _ = synchronize(bound, before, state)
            return jax.tree.map(np.array, params)
        finally:
            ud.shutdown()


def save_and_resume(line: str, folder: str) -> tuple[str, Any, Any]:
    """Save in the middle; return the error of saving too early, and what training on and a resumed one give."""
    with set_variables({"UNIDIST_STRATEGY": line}):
        ud.init()
        try:

            def some(step: Any, numbers: range) -> None:
                for number in numbers:
                    step(*batch_of(number, ud.rank()))

            step = ud.TrainStep(loss_fn, parameters(), OPTIMIZERS["momentum"]())
            some(step, range(3))
            message = ""
            try:
                ud.save(folder, step)
            except UnidistError as exc:
                message = str(exc)
            synchronize(step)
            ud.save(folder, step)
            some(step, range(3, 6))
            resumed = ud.TrainStep(loss_fn, parameters(), OPTIMIZERS["momentum"]())
            some(resumed, range(2))
            ud.load(folder, resumed)
            some(resumed, range(3, 6))
            return message, jax.tree.map(np.array, step.params), jax.tree.map(np.array, resumed.params)
        finally:
            ud.shutdown()


def refused(line: str) -> str:
    """Return the error of distributing an optimizer."""
    with set_variables({"UNIDIST_STRATEGY": line}):
        ud.init()
        try:
            ud.distribute(optax.sgd(0.1))
        except UnidistError as exc:
            return str(exc)
        finally:
            ud.shutdown()
    return ""
