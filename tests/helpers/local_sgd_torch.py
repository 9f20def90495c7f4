"""Trainings under `local_sgd` on ranks, and the same by copies of a model in one process, which know no unidist."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pretended_hosts import pretend

import unidist.torch as ud
from unidist.errors import UnidistError
from unidist.settings.environment import set_variables
from unidist_local_sgd import synchronize

BATCH = 4
FEATURES = 5

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
}


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        every: H.
        after: updates whose gradients are averaged first.
        outer: "average", "sgd", "momentum" or "nesterov".
        rate: of the outer optimizer.
        momentum: of the outer optimizer.
        fragments: number of parts of the parameters; the simulation knows those of `parts_of`.
        delay: updates between sending and applying.
        mix: weight of own values.
        optimizer: name in `OPTIMIZERS`.
        steps: updates.
        more: further strategies of the line.
        options: further options of the strategy.
        closure: step with a closure.
        synchronizes_before_save: end the window by `synchronize` before a checkpoint.
        hosts: pretend to be on so many hosts, whose ranks train together; 0: each rank trains by itself.
    """

    every: int
    after: int = 0
    outer: str = "average"
    rate: float = 1.0
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    optimizer: str = "sgd"
    steps: int = 11
    more: str = ""
    options: str = ""
    closure: bool = False
    synchronizes_before_save: bool = False
    hosts: int = 0

    def line(self) -> str:
        """Return the strategy line."""
        line = f"local_sgd={self.every}:after={self.after}:fragments={self.fragments}:delay={self.delay}:mix={self.mix}"
        if self.outer != "average":
            line += f":outer={self.outer}:outer_lr={self.rate}"
        if self.outer in ("momentum", "nesterov"):
            line += f":outer_momentum={self.momentum}"
        line += ":across=hosts" if self.hosts else ""
        return line + self.options + self.more


def make_model() -> torch.nn.Module:
    """Return a model of 64 bits whose parameters are of different sizes."""
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 7), torch.nn.Tanh(), torch.nn.Linear(7, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    ).double()


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.sin(x.sum(1, keepdim=True)) + 0.1 * rank


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    """Return the loss of one rank in one step."""
    x, y = batch_of(step, rank)
    return torch.nn.functional.mse_loss(model(x), y)


def values_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return copies of the parameters by name, as arrays."""
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


def take_steps(model: torch.nn.Module, optimizer: Any, case: Case, first: int, last: int) -> None:
    """Train from step `first` to before `last` on this rank."""
    for step in range(first, last):
        optimizer.zero_grad()
        if case.closure:

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step, ud.rank())
                loss.backward()
                return loss

            optimizer.step(closure)
        else:
            loss_of(model, step, ud.rank()).backward()
            optimizer.step()


def train(cases: list[Case]) -> list[dict[str, Any]]:
    """Train each case on this rank; return its parameters at the end."""
    found = []
    for case in cases:
        with set_variables({"UNIDIST_STRATEGY": case.line()}):
            ud.init()
            try:
                if case.hosts:
                    pretend(case.hosts)
                model = make_model()
                optimizer = OPTIMIZERS[case.optimizer](model.parameters())
                model, optimizer = ud.distribute(model, optimizer)
                take_steps(model, optimizer, case, 0, case.steps)
                found.append(values_of(model))
            finally:
                ud.shutdown()
    return found


def parts_of(fragments: int) -> list[list[int]]:
    """Return the parameters of each fragment by hand: their sizes are 35, 7, 28, 4, 4 and 1."""
    return {1: [[0, 1, 2, 3, 4, 5]], 2: [[0, 1], [2, 3, 4, 5]], 3: [[0], [1, 2], [3, 4, 5]]}[fragments]


def simulate(case: Case, size: int) -> list[dict[str, Any]]:
    """Return what each of `size` ranks has at the end, by copies of the model in this process.

    The outer optimizer is one of `torch.optim` on a copy of the model, as in the published algorithms.
    """
    models = [make_model() for _ in range(size)]
    outer_model = make_model()
    workers = [OPTIMIZERS[case.optimizer](model.parameters()) for model in models]
    momentum = case.momentum if case.outer in ("momentum", "nesterov") else 0.0
    parts = parts_of(case.fragments)
    glob = list(outer_model.parameters())
    outers = [
        torch.optim.SGD([glob[i] for i in part], lr=case.rate, momentum=momentum, nesterov=case.outer == "nesterov")
        for part in parts
    ]
    replicas = [list(model.parameters()) for model in models]
    sent: dict[int, list[torch.Tensor]] = {}
    for step in range(case.steps):
        for rank, (model, worker) in enumerate(zip(models, workers, strict=True)):
            worker.zero_grad()
            loss_of(model, step, rank).backward()
        num_groups = 1 if step < case.after else case.hosts or size
        for group in torch.arange(size).chunk(num_groups):
            for own in zip(*(replicas[rank] for rank in group), strict=True):
                mean = torch.stack([each.grad for each in own]).mean(0)
                for each in own:
                    each.grad = mean.clone()
        for worker in workers:
            worker.step()
        if step < case.after:
            outer_model.load_state_dict(copy.deepcopy(models[0].state_dict()))
            continue
        position = step + 1 - case.after
        for k, part in enumerate(parts):
            begin = -(-(k + 1) * case.every // len(parts))
            if position >= begin and (position - begin) % case.every == 0:
                sent[k] = [glob[i].detach() - torch.stack([own[i].detach() for own in replicas]).mean(0) for i in part]
            arrived = position - case.delay
            if arrived >= begin and (arrived - begin) % case.every == 0:
                for i, difference in zip(part, sent.pop(k), strict=True):
                    glob[i].grad = difference
                outers[k].step()
                with torch.no_grad():
                    for i in part:
                        for own in replicas:
                            own[i].copy_(case.mix * own[i] + (1 - case.mix) * glob[i])
    return [values_of(model) for model in models]


def save_plain(case: Case, folder: str) -> dict[str, Any]:
    """Train under `data`, and save in the middle; return the parameters at the end."""
    return save_and_train(case, folder, "data")


def save_and_train(case: Case, folder: str, line: str) -> dict[str, Any]:
    """Save in the middle of a training; return the parameters at its end."""
    middle = case.steps // 2
    with set_variables({"UNIDIST_STRATEGY": line}):
        ud.init()
        try:
            model = make_model()
            model, optimizer = ud.distribute(model, OPTIMIZERS[case.optimizer](model.parameters()))
            take_steps(model, optimizer, case, 0, middle)
            if case.synchronizes_before_save:
                synchronize(optimizer)
            ud.save(folder, model, optimizer)
            take_steps(model, optimizer, case, middle, case.steps)
            return values_of(model)
        finally:
            ud.shutdown()


def save_and_resume(case: Case, folder: str) -> tuple[Any, Any, int]:
    """Save in the middle of a window; return what training on gives, what a resumed one gives, and its step."""
    undisturbed = save_and_train(case, folder, case.line())
    return undisturbed, *load_and_train(case, folder)


def load_and_train(case: Case, folder: str, line: str | None = None) -> tuple[Any, int]:
    """Load a checkpoint of the middle of a training, and train to its end, with the case's strategies or others."""
    with set_variables({"UNIDIST_STRATEGY": case.line() if line is None else line}):
        ud.init()
        try:
            model = make_model()
            model, optimizer = ud.distribute(model, OPTIMIZERS[case.optimizer](model.parameters()))
            take_steps(model, optimizer, replace(case, closure=False), 0, 3)  # what is loaded replaces all of this
            ud.load(folder, model, optimizer)
            take_steps(model, optimizer, case, case.steps // 2, case.steps)
            return values_of(model), optimizer._unidist._update.step
        finally:
            ud.shutdown()


def step_one_after_another(folder: str) -> bool:
    """Make the updates of a window on rank 0 before rank 1 makes its first; return whether rank 0 came so far.

    It would wait for rank 1 if any of its steps needed another rank.
    """
    case = Case(4)
    with set_variables({"UNIDIST_STRATEGY": case.line(), "UNIDIST_TIMEOUT_SEC": "60"}):
        ud.init()
        try:
            model = make_model()
            model, optimizer = ud.distribute(model, OPTIMIZERS[case.optimizer](model.parameters()))
            is_done = Path(folder) / "done"
            deadline = time.monotonic() + 120
            if ud.rank() == 0:
                take_steps(model, optimizer, case, 0, 3)
                is_done.touch()
            while not is_done.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            came_so_far = is_done.exists()
            if ud.rank() == 1:
                take_steps(model, optimizer, case, 0, 3)
            take_steps(model, optimizer, case, 3, 4)
            return came_so_far
        finally:
            ud.shutdown()


def step_unequally(folder: str) -> str:
    """Let rank 1 not come to the synchronization; return the error of this rank."""
    case, has_failed = Case(4), Path(folder) / "failed"
    with set_variables({"UNIDIST_STRATEGY": case.line(), "UNIDIST_TIMEOUT_SEC": "5"}):
        ud.init()
        try:
            model = make_model()
            model, optimizer = ud.distribute(model, OPTIMIZERS[case.optimizer](model.parameters()))
            take_steps(model, optimizer, case, 0, 3)
            deadline = time.monotonic() + 60
            if ud.rank() == 1:
                while not has_failed.exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
                return ""
            try:
                take_steps(model, optimizer, case, 3, 4)
            except UnidistError as exc:
                return f"{type(exc).__name__}: {exc} {exc.__notes__}"
            finally:
                has_failed.touch()
            return "no error"
        finally:
            ud.shutdown()


def train_with_train_step(line: str, steps: int) -> tuple[dict[str, Any], list[float]]:
    """Train by `TrainStep`, with every check of `--verify`; return parameters and losses."""
    with set_variables({"UNIDIST_STRATEGY": line, "UNIDIST_VERIFY": "every=1"}):
        ud.init()
        try:
            model = make_model()
            step = ud.TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), torch.nn.functional.mse_loss)
            losses = [float(step(*batch_of(number, ud.rank()))) for number in range(steps)]
            return values_of(step.model), losses
        finally:
            ud.shutdown()


def synchronize_at_the_end(line: str) -> tuple[bool, dict[str, Any]]:
    """End a training in the middle of a window; return whether parameters were synchronized, and the parameters."""
    case = Case(4, optimizer="adamw")
    with set_variables({"UNIDIST_STRATEGY": line}):
        ud.init()
        try:
            model = make_model()
            model, optimizer = ud.distribute(model, OPTIMIZERS[case.optimizer](model.parameters()))
            take_steps(model, optimizer, case, 0, 6)
            has_synchronized = synchronize(optimizer)
            return has_synchronized, values_of(model)
        finally:
            ud.shutdown()
