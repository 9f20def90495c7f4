"""Models over a pipeline that need a look of their own. Run on the ranks of a pool, in one or a few calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import unidist.torch as ud
from unidist.settings.environment import set_variables
from unidist_pipeline.strategy import Pipeline

WIDTH, SAMPLES = 4, 10


@contextmanager
def runtime(strategy: str) -> Iterator[None]:
    """Run with a strategy line."""
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            yield
        finally:
            ud.shutdown()


def normalised() -> torch.nn.Sequential:
    """Return layers with running statistics."""
    torch.manual_seed(0)
    parts = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH)) for _ in range(4)]
    return torch.nn.Sequential(*parts).double()


def data(seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(SAMPLES, WIDTH, generator=generator).to(dtype) for _ in range(2))  # type: ignore[return-value]


def batch_norm() -> tuple[float, set[str]]:
    """Train beside one process that runs the same micro-batches; returns the largest difference and what is held."""
    plain, model = normalised(), normalised()
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    loss_fn = torch.nn.functional.mse_loss
    with runtime("pipeline=2:microbatches=3"):
        step = ud.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
        for number in range(3):
            inputs, targets = data(number)
            for piece in (slice(0, 4), slice(4, 7), slice(7, 10)):
                part = inputs[piece]
                (loss_fn(plain(part), targets[piece]) * len(part) / SAMPLES).backward()
            other.step()
            other.zero_grad()
            step(inputs, targets)
        expected, found = plain.state_dict(), step.model.state_dict()
        error = max(float((value - expected[name]).abs().max()) for name, value in found.items())
        plain.eval()
        inputs, targets = data(9)
        error = max(error, abs(float(step.evaluate(inputs, targets)) - float(loss_fn(plain(inputs), targets).detach())))
    return error, set(found)


def narrow(strategy: str) -> dict[str, Any]:
    """Train in 16 bits; returns this rank's parameters."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH))]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, WIDTH))
    with runtime(strategy):
        step = ud.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)
        losses = [float(step(*data(number, torch.float32))) for number in range(4)]
        parameters = {name: value.detach().float().numpy().copy() for name, value in step.model.named_parameters()}
    return {**parameters, "losses": losses}


def random_numbers() -> tuple[list[float], list[float]]:
    """Train with dropout; returns what the script draws afterwards, and what this rank's stage has dropped."""
    dropped: list[torch.Tensor] = []

    class Noting(torch.nn.Dropout):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            result = super().forward(input)
            if self.training:  # not while outputs are verified
                dropped.append((result == 0).double().flatten())
            return result

    torch.manual_seed(3)
    layers = [
        layer for _ in range(2) for layer in (torch.nn.Linear(WIDTH, 30), Noting(0.5), torch.nn.Linear(30, WIDTH))
    ]
    model = torch.nn.Sequential(*layers)
    with runtime("pipeline=2:microbatches=2:split=3"):
        step = ud.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)
        step(*data(0, torch.float32))
        return torch.rand(3).tolist(), torch.cat(dropped).tolist()


def unfreezing() -> float:
    """Train while the first stage is frozen, then all; returns the largest difference from one process."""

    def model() -> torch.nn.Sequential:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
        for layer in layers[:2]:
            layer.requires_grad_(False)
        return layers

    plain, divided = model(), model()
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    loss_fn = torch.nn.functional.mse_loss
    with runtime("pipeline=2:schedule=zb-h1:microbatches=2"):
        step = ud.TrainStep(divided, torch.optim.SGD(divided.parameters(), lr=0.1, momentum=0.9), loss_fn)
        for number in range(4):
            if number == 2:
                for layers in (plain, divided):
                    layers.requires_grad_(True)
            inputs, targets = data(number)
            loss_fn(plain(inputs), targets).backward()
            other.step()
            other.zero_grad()
            step(inputs, targets)
    expected = dict(plain.named_parameters())
    return max(float((value - expected[name]).detach().abs().max()) for name, value in divided.named_parameters())


class Branching(torch.nn.Module):
    """Decides by a value what to do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return one of two things."""
        hidden = self.first(hidden)
        return self.second(hidden) if hidden.sum() > 0 else hidden


def refusals() -> dict[str, str]:
    """Ask for what cannot be; returns the errors."""

    def row(count: int) -> torch.nn.Sequential:
        return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(count)))

    hooked = row(4)
    hooked.register_forward_hook(lambda module, args, output: None)
    again = row(1)
    asked: dict[str, tuple[torch.nn.Module, Any]] = {
        "branching": (Branching(), "pipeline=2"),
        "too few parts": (row(1), "pipeline=2"),
        "unknown point": (row(4), "pipeline=2:split=nine"),
        "points": (row(4), "pipeline=2:split=1+2"),
        "first point": (row(4), "pipeline=2:split=0"),
        "hooks": (hooked, "pipeline=2"),
        "zero=3": (row(4), "pipeline=2,zero=3"),
        "schedule": (row(4), "pipeline=2:schedule=2f2b"),
        "example": (row(4), "pipeline=2:balance=time"),
        "statistics": (
            torch.nn.Sequential(norm := torch.nn.BatchNorm1d(WIDTH), again, norm),
            Pipeline(2, split="1"),
        ),
    }
    found = {}
    with runtime(""):
        for name, (model, strategy) in asked.items():
            try:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                ud.TrainStep(model, optimizer, torch.nn.functional.mse_loss, strategy=strategy)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        model = row(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            ud.distribute(model, optimizer, "pipeline=2")
        except Exception as error:
            found["distribute"] = f"{type(error).__name__}: {error}"
        step = ud.TrainStep(model, optimizer, torch.nn.functional.mse_loss, strategy="pipeline=2")
        for name, act in (
            ("call", lambda: step.model(torch.ones(2, WIDTH))),
            ("arguments", lambda: step.predict({"wrong": torch.ones(2, WIDTH)})),
        ):
            try:
                act()
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def beside_torch(folder: str) -> float:
    """Train with 1F1B here and, independently, with torch.distributed.pipelining; returns the largest difference."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    def network() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            *(layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()))
        )

    loss_fn = torch.nn.functional.mse_loss
    batches = [tuple(each[:8] for each in data(number, torch.float32)) for number in range(4)]
    with runtime("pipeline=2:microbatches=4:split=4"):
        rank, size = ud.rank(), ud.size()
        model = network()
        step = ud.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.05), loss_fn)
        for inputs, targets in batches:
            step(inputs, targets)
        found = {name: value.detach().clone() for name, value in step.model.named_parameters()}
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    try:
        whole = network()
        part = whole[:4] if rank == 0 else whole[4:]
        stage = PipelineStage(part, rank, size, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=loss_fn)
        optimizer = torch.optim.AdamW(part.parameters(), lr=0.05)
        for inputs, targets in batches:
            schedule.step(inputs) if rank == 0 else schedule.step(target=targets)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    expected = dict(whole.named_parameters())
    return max(float((value - expected[name]).detach().abs().max()) for name, value in found.items())
