"""Trainings under `local_sgd` with optax on ranks, and the same by trees in one process, which know no unidist."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pretended_hosts import pretend

import unidist.jax as ud
from unidist.errors import UnidistError
from unidist.settings.environment import set_variables
from unidist_local_sgd.jax import synchronize

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adamw": lambda: optax.adamw(0.02),
}
PARTS = {1: [["a", "b", "c"]], 2: [["a"], ["b", "c"]]}
"""The parameters of each fragment, by hand: their sizes are 35, 28 and 4."""


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        every: H.
        after: updates whose gradients are averaged first.
        outer: "average", "sgd" or "nesterov".
        rate: of the outer optimizer.
        fragments: number of parts of the parameters.
        delay: updates between sending and applying.
        mix: weight of own values.
        optimizer: name in `OPTIMIZERS`.
        mode: "step" for `TrainStep`, "jit" and "eager" for loops of the script.
        steps: updates.
        passes: backward passes of an update.
        options: further options of the strategy.
        hosts: pretend to be on so many hosts; 0: each rank trains by itself.
    """

    every: int
    after: int = 0
    outer: str = "average"
    rate: float = 1.0
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    optimizer: str = "sgd"
    mode: str = "step"
    steps: int = 11
    passes: int = 1
    options: str = ""
    hosts: int = 0

    def line(self) -> str:
        """Return the strategy line."""
        line = f"local_sgd={self.every}:after={self.after}:fragments={self.fragments}:delay={self.delay}:mix={self.mix}"
        if self.outer != "average":
            line += f":outer={self.outer}:outer_lr={self.rate}"
        line += ":across=hosts" if self.hosts else ""
        return line + self.options + (f",accumulate={self.passes}" if self.passes > 1 else "")


def parameters() -> Any:
    """Return the parameters before training."""
    random = np.random.default_rng(7)
    return {name: jnp.asarray(0.4 * random.standard_normal(shape)) for name, shape in SHAPES.items()}


SHAPES = {"a": (5, 7), "b": (7, 4), "c": (4, 1)}


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    """Return the mean loss."""
    hidden = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
    return jnp.mean((hidden @ params["c"] - y) ** 2)


def batch_of(number: int, rank: int) -> tuple[Any, Any]:
    """Return the samples of one rank in one pass."""
    x = np.random.default_rng(1000 * number + rank).standard_normal((4, 5))
    return x, np.sin(x.sum(1, keepdims=True)) + 0.1 * rank


def train(cases: list[Case]) -> list[tuple[Any, Any]]:
    """Train each case; return this rank's parameters, and those after the window was ended."""
    found = []
    for case in cases:
        with set_variables({"UNIDIST_STRATEGY": case.line()}):
            ud.init()
            try:
                if case.hosts:
                    pretend(case.hosts)
                found.append(_train(case))
            finally:
                ud.shutdown()
    return found


def _train(case: Case) -> tuple[Any, Any]:
    batches = [batch_of(number, ud.rank()) for number in range(case.steps * case.passes)]
    if case.mode == "step":
        step = ud.TrainStep(loss_fn, parameters(), OPTIMIZERS[case.optimizer]())
        for batch in batches:
            step(*batch)
        params = jax.tree.map(np.array, step.params)
        assert synchronize(step)
        return params, jax.tree.map(np.array, step.params)
    params, optimizer = ud.distribute(parameters(), OPTIMIZERS[case.optimizer]())
    state = optimizer.init(params)

    def update(params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss_fn)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(update) if case.mode == "jit" else update
    for x, y in batches:
        params, state = run(params, state, jnp.asarray(x), jnp.asarray(y))
    return jax.tree.map(np.array, params), jax.tree.map(np.array, synchronize(optimizer, params, state)[0])


def simulate(case: Case, size: int) -> tuple[list[Any], Any]:
    """Return what each of `size` ranks has at the end, and all of them after the window was ended."""
    inner = OPTIMIZERS[case.optimizer]()
    replicas = [dict(parameters()) for _ in range(size)]
    states = [inner.init(each) for each in replicas]
    start, speed = dict(parameters()), {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    momentum = 0.9 if case.outer == "nesterov" else 0.0
    gradient_of = jax.jit(jax.grad(loss_fn))

    def apply(differences: Any, mix: float) -> None:
        for name, gradient in differences.items():
            speed[name] = momentum * speed[name] + gradient
            start[name] = start[name] - case.rate * (gradient + momentum * speed[name])
            for own in replicas:
                own[name] = mix * own[name] + (1 - mix) * start[name]

    def differences(names: Any) -> Any:
        return {name: start[name] - sum(own[name] for own in replicas) / size for name in names}

    sent: dict[int, Any] = {}
    position = 0
    parts = PARTS[case.fragments]
    for step in range(case.steps):
        gradients = []
        for rank, own in enumerate(replicas):
            passes = range(step * case.passes, (step + 1) * case.passes)
            each = [gradient_of(own, *batch_of(number, rank)) for number in passes]
            gradients.append(jax.tree.map(lambda *parts: sum(parts) / case.passes, *each))
        num_groups = 1 if step < case.after else case.hosts or size
        for group in np.array_split(np.arange(size), num_groups):
            mean = jax.tree.map(lambda *parts: sum(parts) / len(parts), *(gradients[rank] for rank in group))
            for rank in group:
                updates, states[rank] = inner.update(mean, states[rank], replicas[rank])
                replicas[rank] = dict(optax.apply_updates(replicas[rank], updates))
        if step < case.after:
            start.update(replicas[0])
            continue
        position += 1
        for k, part in enumerate(parts):
            begin = -(-(k + 1) * case.every // len(parts))
            if position >= begin and (position - begin) % case.every == 0:
                sent[k] = differences(part)
            arrived = position - case.delay
            if arrived >= begin and (arrived - begin) % case.every == 0:
                apply(sent.pop(k), case.mix)
    before = [jax.tree.map(np.array, own) for own in replicas]
    if position and (position % case.every or case.delay or case.mix or len(parts) > 1):
        for pending in sent.values():
            apply(pending, case.mix)
        apply(differences(SHAPES), 0.0)
    return before, jax.tree.map(np.array, replicas[0])


def save_and_resume(case: Case, folder: str) -> tuple[str, Any, Any]:
    """Save in the middle of a window; return the error of that, and what training on and a resumed one give."""
    with set_variables({"UNIDIST_STRATEGY": case.line()}):
        ud.init()
        try:
            path = Path(folder)

            def some(step: Any, numbers: range) -> None:
                for number in numbers:
                    step(*batch_of(number, ud.rank()))

            step = ud.TrainStep(loss_fn, parameters(), OPTIMIZERS[case.optimizer]())
            some(step, range(6))
            message = ""
            try:
                ud.save(path, step)
            except UnidistError as exc:
                message = str(exc)
            synchronize(step)
            ud.save(path, step)
            some(step, range(6, 12))
            resumed = ud.TrainStep(loss_fn, parameters(), OPTIMIZERS[case.optimizer]())
            some(resumed, range(3))
            ud.load(path, resumed)
            some(resumed, range(6, 12))
            return message, jax.tree.map(np.array, step.params), jax.tree.map(np.array, resumed.params)
        finally:
            ud.shutdown()


def save_without_optimizer(folder: str) -> str:
    """Return the error of saving trees alone, of which nobody knows whether the ranks have the same."""
    with set_variables({"UNIDIST_STRATEGY": "local_sgd=4"}):
        ud.init()
        try:
            params, optimizer = ud.distribute(parameters(), OPTIMIZERS["sgd"]())
            ud.save(folder, params, optimizer.init(params))
        except UnidistError as exc:
            return str(exc)
        finally:
            ud.shutdown()
    return ""
