"""Trainings in PyTorch that the ranks of a pool run with the strategy, and the same in plain PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import unidist.torch as ud
from unidist.settings.environment import set_variables
from unidist_parameter_server.store import SharedMemoryStore
from unidist_parameter_server.store.flat import FlatChange
from unidist_torch.training.conformance import Model

Array = np.ndarray[Any, Any]
BATCH, CLASSES, WIDTH = 12, 3, 6

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
}


@contextmanager
def unidist_with(strategy: str) -> Iterator[None]:
    """Start unidist with a strategy line."""
    with set_variables({"UNIDIST_STRATEGY": strategy}):
        ud.init()
        try:
            yield
        finally:
            ud.shutdown()


def made(optimizer: str) -> tuple[Any, Any]:
    """Return the conformance suite's model, with an optimizer of two groups."""
    model = Model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, OPTIMIZERS[optimizer]([{"params": trained[:2]}, {"params": trained[2:], "lr": 0.02}])


def batches(steps: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of all ranks together."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64),
            torch.randint(0, CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(steps)
    ]


def loss_of(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss."""
    loss: torch.Tensor = torch.nn.functional.cross_entropy(model(inputs), targets) + model.narrow_loss(inputs)
    return loss


def values(model: Any) -> dict[str, Array]:
    """Return copies of the parameters, without the one in float32."""
    return {name: each.detach().numpy().copy() for name, each in model.named_parameters() if name != "narrow"}


def alone(optimizer: str, steps: int, passes: int = 1) -> dict[str, Array]:
    """Train in plain PyTorch, in this process, on whole batches."""
    model, plain = made(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
    for number, (inputs, targets) in enumerate(batches(steps * passes), start=1):
        (loss_of(model, inputs, targets) / passes).backward()
        if number % passes == 0:
            plain.step()
            plain.zero_grad()
            scheduler.step()
    return values(model)


def trained(strategy: str, optimizer: str, steps: int, passes: int = 1) -> dict[str, Array]:
    """Train on this rank's samples of each batch, in a loop of the script's own."""
    with unidist_with(strategy):
        model, bound = made(optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(bound, 0.9)
        model, bound = ud.distribute(model, bound)
        for number, (inputs, targets) in enumerate(batches(steps * passes), start=1):
            bound.zero_grad()
            loss_of(model, inputs[ud.rank() :: ud.size()], targets[ud.rank() :: ud.size()]).backward()
            bound.step()
            if number % passes == 0:
                scheduler.step()
        return values(model)


def all_trained(cases: Sequence[tuple[str, str, int]]) -> list[dict[str, Array]]:
    """Train for each strategy line, optimizer and number of passes, five updates."""
    return [trained(strategy, optimizer, 5, passes) for strategy, optimizer, passes in cases]


def error(found: dict[str, Array], expected: dict[str, Array]) -> float:
    """Return the largest difference of a parameter."""
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - expected[name]).max(initial=0.0)) for name in expected)


class Recorded:
    """Records on this rank which pushes its store applies, with what.

    Attributes:
        pushes: the whole gradient or difference of each push, by its number, one array for each shard.
    """

    def __init__(self) -> None:
        self.pushes: dict[int, list[Array]] = {}
        self.stores: list[SharedMemoryStore] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record within the block."""
        plain_push, plain_init, plain_push_all = (
            SharedMemoryStore.push,
            SharedMemoryStore.__init__,
            SharedMemoryStore.push_all,
        )

        def push(
            store: SharedMemoryStore, index: int, push: Any, receive: Any = None, *, waits: bool = True
        ) -> int | None:
            self.pushes.setdefault(push.number, []).append(np.empty(0))
            shards = self.pushes[push.number]
            shards += [np.empty(0)] * (len(store.shards) - len(shards))
            plain_change = push.change

            def change(shard: Any) -> Array:
                found: Array = plain_change(shard)
                shards[index] = found.copy()
                return found

            return plain_push(store, index, type(push)(**{**vars(push), "change": change}), receive, waits=waits)

        def push_all(store: SharedMemoryStore, order: Any, push: Any, receiver: Any = None) -> dict[int, int]:
            if isinstance(push.change, FlatChange):  # C code pushes to all shards at once
                self.pushes[push.number] = [push.change(shard).copy() for shard in store.shards]
            return plain_push_all(store, order, push, receiver)

        def init(store: SharedMemoryStore, *args: Any, **kwargs: Any) -> None:
            plain_init(store, *args, **kwargs)
            self.stores.append(store)

        SharedMemoryStore.push, SharedMemoryStore.__init__ = push, init  # type: ignore[method-assign]
        SharedMemoryStore.push_all = push_all  # type: ignore[method-assign]
        try:
            yield
        finally:
            SharedMemoryStore.push, SharedMemoryStore.__init__ = plain_push, plain_init  # type: ignore[method-assign]
            SharedMemoryStore.push_all = plain_push_all  # type: ignore[method-assign]


def linear_problem(strategy: str, steps: int, learning_rate: float = 0.1) -> tuple[Any, ...]:
    """Solve a linear problem; return what was logged, what this rank has pushed, and the final weights of the store."""
    import unidist_parameter_server.workers.worker as worker_module

    recorded = Recorded()
    plain_shape = worker_module.StoreShape

    def logging_shape(*args: Any) -> Any:
        return plain_shape(*args[:5], 1000)

    worker_module.StoreShape = logging_shape  # type: ignore[assignment,misc]
    try:
        with unidist_with(strategy), recorded.recording():
            weights = torch.nn.Parameter(torch.zeros(40, dtype=torch.float64))
            model: Any = torch.nn.ParameterDict({"weights": weights})
            optimizer: Any = torch.optim.SGD([weights], lr=learning_rate)
            model, optimizer = ud.distribute(model, optimizer)
            target = torch.arange(40, dtype=torch.float64)
            for step in range(steps):
                time.sleep(0.002 * ((step + ud.rank()) % 3 == 0))
                optimizer.zero_grad()
                ((weights - target) ** 2 / 2).sum().backward()
                optimizer.step()
            ud.barrier()
            (store,) = recorded.stores
            final: list[Array] = []
            for index in range(len(store.shards)):
                store.read(index, lambda found: final.append(found.copy()))
            return [store.log(index) for index in range(len(final))], recorded.pushes, final
    finally:
        worker_module.StoreShape = plain_shape  # type: ignore[misc]


def saved(strategy: str, optimizer: str, folder: str, steps: int) -> dict[str, Array]:
    """Train, save, and return the parameters that were saved."""
    with unidist_with(strategy):
        model, bound = made(optimizer)
        model, bound = ud.distribute(model, bound)
        for inputs, targets in batches(steps):
            bound.zero_grad()
            loss_of(model, inputs[ud.rank() :: ud.size()], targets[ud.rank() :: ud.size()]).backward()
            bound.step()
        ud.save(folder, model, bound)
        return values(model)


def continued(strategy: str, optimizer: str, folder: str, steps: int) -> dict[str, Array]:
    """Load and train on."""
    with unidist_with(strategy):
        model, bound = made(optimizer)
        model, bound = ud.distribute(model, bound)
        if folder:
            ud.load(folder, model, bound)
        for inputs, targets in batches(steps, seed=2):
            bound.zero_grad()
            loss_of(model, inputs[ud.rank() :: ud.size()], targets[ud.rank() :: ud.size()]).backward()
            bound.step()
        return values(model)
