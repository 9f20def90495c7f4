"""Trainings under `local_sgd` in an elastic job, and the same by copies of a model in one process.

Each script says where the ranks changed: `history` has, for each generation, the updates that count before it and its
number of ranks. A change ends the window among those that hold the last commit.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_job import ElasticJob

HELPERS = Path(__file__).parent
STEPS = 19
COMMIT_EVERY = 6
KILLED_AT = 9
"""Updates after which a rank dies. With H = 4 the ranks were synchronized in between, which does not count."""
WAITS_AT = 13
"""Updates after which the others wait for one that takes its place."""

TORCH = """
import os, signal, sys, time
import torch
import unidist.torch as ud
from unidist_local_sgd import synchronize
from local_sgd_torch import OPTIMIZERS, loss_of, make_model, values_of
from local_sgd_elastic import COMMIT_EVERY, KILLED_AT, STEPS, WAITS_AT, say

torch.set_num_threads(1)
ud.init()
model = make_model()
model, optimizer = ud.distribute(model, OPTIMIZERS[sys.argv[1]](model.parameters()))
state = ud.elastic.TorchState(model, optimizer, step=0, history=[])

@ud.elastic.run
def train(state):
    state.history = [*state.history, (state.step, ud.size())]
    while state.step < STEPS:
        while state.step == WAITS_AT and ud.size() < 3:
            state.check_host_updates()
            time.sleep(0.01)
        if state.step == KILLED_AT and ud.rank() == 1 and len(state.history) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss_of(model, state.step, ud.rank()).backward()
        optimizer.step()
        state.step += 1
        if state.step % COMMIT_EVERY == 0:
            state.commit()

train(state)
synchronize(optimizer)
say("history", state.history)
say("done", {name: value.ravel().tolist() for name, value in values_of(model).items()})
"""

BY_FLAG = """
import os, signal
import torch
import unidist.torch as ud
from unidist_local_sgd import synchronize
from local_sgd_elastic import say

torch.set_num_threads(1)
ud.init()
torch.manual_seed(0)
inputs = torch.randn(60, 5, dtype=torch.float64)
data = torch.utils.data.TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
policy = ud.elastic.Policy(commit_every=2)
step = ud.TrainStep(model, optimizer, torch.nn.functional.mse_loss, elastic=policy)
loader = ud.shard(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
calls = 0
for epoch in range(4):
    for x, y in loader:
        step(x, y)
        calls += 1
        if calls == 7 and os.environ["UNIDIST_WORKER"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
synchronize(optimizer)
say("done", [parameter.ravel().tolist() for parameter in step.model.parameters()])
"""

KERAS = """
import os, signal, sys, time
import keras
import numpy as np
import tensorflow as tf
import unidist.keras as ud
from unidist_local_sgd import synchronize
from local_sgd_elastic import COMMIT_EVERY, KILLED_AT, RATE, STEPS, WAITS_AT, linear_batch, linear_weights, say

ud.init()
keras.config.set_floatx("float64")
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, use_bias=False)])
model.set_weights([linear_weights()])
model, optimizer = ud.distribute(model, keras.optimizers.SGD(RATE, momentum=0.5))
state = ud.elastic.KerasState(model, optimizer, step=0, history=[])

@tf.function
def update(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

@ud.elastic.run
def train(state):
    state.history = [*state.history, (state.step, ud.size())]
    while state.step < STEPS:
        while state.step == WAITS_AT and ud.size() < 3:
            state.check_host_updates()
            time.sleep(0.01)
        if state.step == KILLED_AT and ud.rank() == 1 and len(state.history) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        update(*map(tf.constant, linear_batch(state.step, ud.rank())))
        state.step += 1
        if state.step % COMMIT_EVERY == 0:
            state.commit()

train(state)
synchronize(optimizer)
say("history", state.history)
say("done", {"kernel": model.get_weights()[0].ravel().tolist()})
"""
RATE = 0.05


def linear_weights() -> Any:
    """Return the weights of a linear model before training, `(5, 1)`."""
    import numpy as np

    return np.linspace(-1.0, 1.0, 5).reshape(5, 1)


def linear_batch(step: int, rank: int) -> tuple[Any, Any]:
    """Return the samples of one rank in one step, `(4, 5)` and `(4, 1)`."""
    import numpy as np

    x = np.random.default_rng(1000 * step + rank).standard_normal((4, 5))
    return x, np.sin(x.sum(1, keepdims=True)) + 0.1 * rank


def simulate_linear(history: Sequence[tuple[int, int]], *, every: int, rate: float, momentum: float) -> Any:
    """Return the weights of the linear model at the end: SGD with momentum in each rank, Nesterov's over them."""
    import numpy as np

    start, outer_speed, speed = linear_weights(), np.zeros((5, 1)), np.zeros((5, 1))
    for number, (begin, size) in enumerate(history):
        end = history[number + 1][0] if number + 1 < len(history) else STEPS
        weights, speeds = [start.copy() for _ in range(size)], [speed.copy() for _ in range(size)]
        for step in range(begin, end):
            for rank in range(size):
                x, y = linear_batch(step, rank)
                speeds[rank] = 0.5 * speeds[rank] - RATE * x.T @ (x @ weights[rank] - y) / 2
                weights[rank] = weights[rank] + speeds[rank]
            is_last = step + 1 == end
            if is_last and (end, size - 1) in history:  # rank 1 is lost
                del weights[1], speeds[1]
            if is_last or (step + 1 - begin) % every == 0:
                gradient = start - np.mean(weights, axis=0)
                outer_speed = momentum * outer_speed + gradient
                start = start - rate * (gradient + momentum * outer_speed)
                weights = [start.copy() for _ in weights]
        speed = np.mean(speeds, axis=0)
    return start


def say(*words: object) -> None:
    """Print a line at once."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def start(script: str, folder: Path, strategy: str, *arguments: str) -> ElasticJob:
    """Start a script on three ranks."""
    (folder / "script.py").write_text(script)
    options = ["-np", "3", "--min-np", "2", "--strategy", strategy]
    environment = {"PYTHONPATH": os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])}
    return ElasticJob.start(folder, options, ["script.py", *arguments], environment)


def run(script: str, folder: Path, strategy: str, *arguments: str) -> tuple[list[tuple[int, int]], list[Any]]:
    """Run a script on three ranks of which one dies; return the history, and the parameters of each rank."""
    with start(script, folder, strategy, *arguments) as job:
        assert job.end(seconds=120) == 0, job.lines
    histories = {text for (text,) in job.said(r"history (.*)")}
    assert len(histories) == 1, job.lines
    found = [ast.literal_eval(text) for (text,) in job.said(r"done (.*)")]
    assert len(found) == 3, job.lines
    return ast.literal_eval(histories.pop()), found


def simulate(case: Any, history: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the parameters after the last window has ended, by copies of the model in this process.

    Args:
        case: a `local_sgd_torch.Case`.
        history: what the job says.
    """
    import copy

    import torch
    from local_sgd_torch import OPTIMIZERS, loss_of, make_model, parts_of, values_of

    glob = make_model()
    start = list(glob.parameters())
    momentum = case.momentum if case.outer in ("momentum", "nesterov") else 0.0
    outer = torch.optim.SGD(start, lr=case.rate, momentum=momentum, nesterov=case.outer == "nesterov")
    parts = parts_of(case.fragments)

    def apply(indices: Sequence[int], gradients: Sequence[torch.Tensor], mix: float) -> None:
        for parameter in start:
            parameter.grad = None
        for index, gradient in zip(indices, gradients, strict=True):
            start[index].grad = gradient
        outer.step()
        with torch.no_grad():
            for i in indices:
                for own in replicas:
                    own[i].copy_(mix * own[i] + (1 - mix) * start[i])

    def differences(indices: Sequence[int]) -> list[torch.Tensor]:
        return [start[i].detach() - torch.stack([own[i].detach() for own in replicas]).mean(0) for i in indices]

    state: dict[int, Any] = {}
    ends = [*(updates for updates, _ in history[1:]), case.steps]
    for (begin, size), end in zip(history, ends, strict=True):
        models = [make_model() for _ in range(size)]
        workers = [OPTIMIZERS[case.optimizer](model.parameters()) for model in models]
        replicas = [list(model.parameters()) for model in models]
        for model, worker in zip(models, workers, strict=True):
            model.load_state_dict(glob.state_dict())
            worker.load_state_dict(copy.deepcopy({**worker.state_dict(), "state": state}))
        pending: dict[int, list[torch.Tensor]] = {}
        for step in range(begin, end):
            for rank, (model, worker) in enumerate(zip(models, workers, strict=True)):
                worker.zero_grad()
                loss_of(model, step, rank).backward()
                worker.step()
            position = step + 1 - begin
            for k, part in enumerate(parts):
                first = -(-(k + 1) * case.every // len(parts))
                if position >= first and (position - first) % case.every == 0:
                    pending[k] = differences(part)
                arrived = position - case.delay
                if arrived >= first and (arrived - first) % case.every == 0:
                    apply(part, pending.pop(k), case.mix)
        is_lost = (end, size - 1) in history
        if is_lost:  # what rank 1 did in its window goes, and so does an exchange under way
            del models[1], workers[1], replicas[1]
        for k, sent in () if is_lost else pending.items():
            apply(parts[k], sent, case.mix)
        if position % case.every or case.delay or case.mix or len(parts) > 1:
            apply(range(len(start)), differences(range(len(start))), 0.0)
        merged: dict[int, Any] = {}
        for index in workers[0].state_dict()["state"]:
            each = [worker.state_dict()["state"][index] for worker in workers]
            merged[index] = {
                name: torch.stack([one[name] for one in each]).mean(0) if value.dim() else value.clone()
                for name, value in each[0].items()
                if isinstance(value, torch.Tensor)
            }
        state = merged
    return values_of(glob)
