"""The trainings of `_zero_cases` in PyTorch, and what else of ZeRO in PyTorch ranks can look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _zero_cases import BATCH, OVERFLOWS, Parameters, TorchCase, Traffic, by_operation, record
from offload_torch import host_as_accelerator
from torch.utils.checkpoint import checkpoint
from whole_torch import Composed, MuonWithAdam, muon_groups

import unidist.torch as ud
from unidist.hierarchical import HierarchicalCommunicator
from unidist.hierarchical.layout import Layout
from unidist.runtime import context
from unidist.settings.environment import set_variables
from unidist_torch.training import conformance

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.02, weight_decay=0.1),
    "muon": lambda groups: MuonWithAdam(muon_groups(groups)),
    "composed": Composed,
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01, weight_decay=0.1),
}


class Model(conformance.Model):
    """The conformance suite's network, with more that gets in the way: a scalar, a tensor in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(1.1, dtype=torch.float64))
        wide = torch.linspace(-1, 1, 2 * 3 * 4 * 5, dtype=torch.float64).reshape(2, 3, 4, 5)
        self.image = torch.nn.Parameter(wide.to(memory_format=torch.channels_last))

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        kernel = torch.tanh(self.image).mean(dim=(2, 3)).sum(0)
        logits = self(inputs) * self.gain + kernel
        loss = torch.nn.functional.cross_entropy(logits, targets)
        return loss + self.narrow_loss(inputs) if self.narrow.requires_grad else loss


class Block(torch.nn.Module):
    """A part of `DeepModel`, with a frozen parameter in its middle, which returns a dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(width, 2 * width + 1)
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1, 2 * width + 1), requires_grad=False)
        self.narrow = torch.nn.Linear(2 * width + 1, width, bias=False)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, inputs: torch.Tensor, *, again: bool = False) -> dict[str, torch.Tensor]:
        """Return the input and what was made of it; optionally, what was made of that."""
        if again:
            inputs = self(inputs)["output"]
        return {"output": inputs + self.narrow(torch.tanh(self.wide(self.norm(inputs))) * self.scale)}


class DeepModel(torch.nn.Module):
    """Four blocks: 0 and 2 share a weight, 1 is used twice, 2 calls itself, 3 is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(6, 8)
        self.blocks = torch.nn.ModuleList(Block(8) for _ in range(4))
        self.blocks[2].narrow.weight = self.blocks[0].narrow.weight
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        self.gain = torch.nn.Parameter(torch.tensor(1.1))
        self.register_buffer("count", torch.zeros(()))
        self.double()
        wide = torch.linspace(-1, 1, 3 * 2 * 4 * 5, dtype=torch.float64).reshape(3, 2, 4, 5)
        self.image = torch.nn.Parameter(wide.to(memory_format=torch.channels_last))
        self.narrow = torch.nn.Parameter(torch.zeros(2))
        self.frozen = torch.nn.Parameter(torch.ones(8, dtype=torch.float64), requires_grad=False)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        return torch.nn.functional.cross_entropy(self(inputs), targets)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        hidden = self.stem(inputs) * self.frozen
        for number in (0, 1, 2, 1):
            hidden = self.blocks[number](hidden, again=number == 2)["output"]
        hidden = checkpoint(self.blocks[3], hidden, use_reentrant=False)["output"]
        return self.head(hidden) * self.gain + torch.tanh(self.image).mean(dim=(1, 2, 3))


def surroundings() -> AbstractContextManager[object]:
    """See `Backend.surroundings`."""
    return host_as_accelerator()


def train_alone(case: TorchCase, *, rank: int = 0, size: int = 1) -> Parameters:
    """See `Backend.train_alone`."""
    model, trained = make(case)
    optimizer: Any = with_groups(case, trained)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(case.steps):
        if case.unfreezes and step == 2:
            unfreeze(model, optimizer)
        optimizer.zero_grad()
        for inputs, targets in shares(case, step, rank, size):
            (model.loss(inputs, targets) / case.passes).backward()
        if case.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, case.max_norm)
        if not (case.scaled and step == OVERFLOWS):
            optimizer.step()
        schedule.step()
    return parameters_of(model)


def train(case: TorchCase) -> Parameters:
    """See `Backend.train`."""
    if case.hosts > 1:
        make_believe(case.hosts)
    model, trained = make(case)
    model, optimizer = ud.distribute(model, with_groups(case, trained))
    if case.loads:
        assert ud.load(case.loads, model, optimizer).extra == {"next": case.first}
    if case.saves_early:
        ud.save(case.saves_early, model, optimizer, extra={"next": case.first})
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(case.first, case.steps):
        if case.unfreezes and step == 2:
            unfreeze(model, optimizer)
        for share in shares(case, step, ud.rank(), ud.size()):

            def closure(share: Any = share) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model.loss(*share)
                loss.backward()
                return loss

            if case.calls_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        schedule.step()
        with torch.no_grad():
            assert torch.isfinite(model(torch.ones(2, 6, dtype=torch.float64))).all(), "evaluation between two updates"
    if case.saves:
        ud.save(case.saves, model, optimizer, extra={"next": case.steps})
    return parameters_of(model)


def make(case: TorchCase) -> tuple[Any, list[torch.nn.Parameter]]:
    """Return the model, not distributed, and what of it is trained."""
    torch.manual_seed(0)
    model: Any = DeepModel() if case.layered else Model()
    if case.max_norm is not None:
        model.narrow.requires_grad = False  # PyTorch would take the norm of all in float32
    return model, [parameter for parameter in model.parameters() if parameter.requires_grad]


def with_groups(case: TorchCase, trained: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer, of two groups."""
    return OPTIMIZERS[case.optimizer]([{"params": trained[:2]}, {"params": trained[2:], "lr": 0.02}])


def unfreeze(model: Any, optimizer: Any) -> None:
    """Train one parameter more from here on."""
    model.frozen.requires_grad = True
    optimizer.add_param_group({"params": [model.frozen], "lr": 0.03})


def shares(case: TorchCase, step: int, rank: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a rank's share of the batch of each pass of an update."""
    for turn in range(case.passes):
        rng = np.random.default_rng((7, step, turn))
        inputs, targets = rng.standard_normal((BATCH, 6)), rng.integers(0, 3, BATCH)
        if case.scaled and (step, turn) == (OVERFLOWS, 0):
            inputs[0] = math.inf
        each = BATCH // size
        mine = slice(rank * each, (rank + 1) * each)
        yield torch.from_numpy(inputs[mine]), torch.from_numpy(targets[mine])


def parameters_of(model: Any) -> Parameters:
    """Return copies of the parameters, by name."""
    names = dict(model.named_parameters())
    return {name: np.array(value.detach().numpy()) for name, value in model.state_dict().items() if name in names}


def record_step(case: TorchCase) -> Traffic:
    """See `Backend.record_step`."""
    records = record(context.current())
    model, trained = make(case)
    nbytes = sum(parameter.nbytes for parameter in trained)
    model, optimizer = ud.distribute(model, with_groups(case, trained))
    for step in range(2):
        records.clear()
        for inputs, targets in shares(case, step, ud.rank(), ud.size()):
            optimizer.zero_grad()
            model.loss(inputs, targets).backward()
            optimizer.step()
    partition = optimizer._unidist._inner._shards[0].exchange.partition
    own = sum(cut.counts[ud.rank()] * cut.dtype.itemsize for cut in partition.buckets)
    whole = sum(cut.count * cut.dtype.itemsize for cut in partition.buckets)
    return Traffic(by_operation(records), own, whole, nbytes)


def make_believe(num_hosts: int) -> None:
    """Let collectives go between hosts, of which there are so many in name only. Collective."""
    runtime = context.current()
    world = runtime.world.split(range(runtime.world.size))
    assert world is not None
    layout = Layout.of([rank * num_hosts // world.size for rank in range(world.size)])
    inner = world.split(layout.hosts[layout.host_of(world.rank)])
    assert inner is not None
    made = runtime._communicators
    made._worlds["host"] = made._keep(HierarchicalCommunicator(world, inner, layout))


@dataclass(frozen=True)
class Footprint:
    """What one rank holds between two updates, and what it gave to collectives in one, in bytes; `total` is of all."""

    total: int
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    most_gathered: int
    scattered: int
    sent_parameters: int
    other: int


def footprint(stage: int) -> Footprint:
    """Train a network of equal blocks in float32 for three steps with Adam."""
    with set_variables({"UNIDIST_STRATEGY": f"zero={stage}", "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            return _footprint(stage)
        finally:
            ud.shutdown()


def _footprint(stage: int) -> Footprint:
    records = record(context.current())
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    total = sum(parameter.nbytes for parameter in model.parameters())
    optimizer: Any = torch.optim.Adam(model.parameters())
    model, optimizer = ud.distribute(model, optimizer)
    most = 0
    for number in range(3):
        records.clear()
        optimizer.zero_grad()
        hidden = torch.ones(4, 64)
        for layer in model:
            hidden = layer(hidden)
            if stage == 3 and number:  # the model is whole until the end of the first backward
                most = max(most, model._unidist.units.nbytes_held)
        hidden.square().mean().backward()
        optimizer.step()
    step = optimizer._unidist._inner
    exchange = step._shards[0].exchange
    units = model._unidist.units.units if stage == 3 else []
    moved = by_operation(records)
    return Footprint(
        total=total,
        parameters=sum(bucket.shard.nbytes for unit in units for bucket in unit.buckets)
        if stage == 3
        else sum(parameter.nbytes for parameter in model.parameters()),
        gradients=sum(exchange.shard(number).nbytes for number in range(len(exchange.partition.buckets)))
        if stage > 1
        else sum(cut.count * cut.dtype.itemsize for cut in exchange.partition.buckets),
        optimizer=sum(
            value.nbytes for segment in step._segments() for value in step._inner.state(segment).values() if value.dim()
        ),
        gathered=model._unidist.units.nbytes_held if stage == 3 else 0,
        most_gathered=most,
        scattered=moved.pop("reducescatter"),
        sent_parameters=moved.pop("allgather"),
        other=sum(moved.values()),
    )
