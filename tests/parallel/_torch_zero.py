"""Trainings in PyTorch under ZeRO that run on the ranks of a pool, many in one call, each beside one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from offload_torch import host_as_accelerator
from torch.utils.checkpoint import checkpoint

import unidist.torch as ud
from unidist import context
from unidist.environment import set_variables
from unidist.hierarchical import HierarchicalCommunicator
from unidist.hierarchical.layout import Layout
from unidist.testing._training import largest_error
from unidist.testing.recording import Record, RecordingCommunicator
from unidist_torch import conformance

BATCH = 12
Parameters = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        strategy: the strategy line.
        optimizer: name of `OPTIMIZERS`.
        passes: calls of a step that make an update.
        steps: updates.
        first: number of the first of them.
        loads: folder of a checkpoint to begin with.
        saves: folder for one at the end.
        deep: a network of blocks that share, are used again, and are computed again.
        contiguous: leave out the tensor in another memory order.
        max_norm: what the line's clip_norm says.
        engine: carries the gradients.
        calls_closure: step with a closure.
        hosts: the ranks make believe that they are on so many.
        unfreezes: a parameter is trained from the third update on, in a group that is added then.
    """

    strategy: str = "zero=2"
    optimizer: str = "adamw"
    passes: int = 1
    steps: int = 10
    first: int = 0
    loads: str = ""
    saves: str = ""
    contiguous: bool = False
    deep: bool = False
    max_norm: float | None = None
    engine: str = "shm"
    calls_closure: bool = False
    hosts: int = 1
    unfreezes: bool = False


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.02, weight_decay=0.1),
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


WATCHED = {"inner", "head", "gain", "stem.weight", "blocks.1.narrow.weight"}


class Block(torch.nn.Module):
    """A part of `DeepModel`, with a frozen parameter in its middle, which returns a dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(width, 2 * width + 1)
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1, 2 * width + 1), requires_grad=False)
        self.narrow = torch.nn.Linear(2 * width + 1, width, bias=False)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the input and what was made of it."""
        return {"output": inputs + self.narrow(torch.tanh(self.wide(self.norm(inputs))) * self.scale)}


class DeepModel(torch.nn.Module):
    """Blocks: the first and the third share a weight, the second is used twice, the last is computed again."""

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
            hidden = self.blocks[number](hidden)["output"]
        hidden = checkpoint(self.blocks[3], hidden, use_reentrant=False)["output"]
        return self.head(hidden) * self.gain + torch.tanh(self.image).mean(dim=(1, 2, 3))


def train(case: Case, *, distributed: bool, rank: int = 0, size: int = 1) -> Parameters:
    """Train on a rank's share of every batch; returns the parameters by name."""
    torch.manual_seed(0)
    model: Any = DeepModel() if case.deep else Model()
    if case.max_norm is not None:
        model.narrow.requires_grad = False  # PyTorch would take the norm of all in float32
    if case.contiguous:
        model.image.data = model.image.data.contiguous()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = OPTIMIZERS[case.optimizer]([{"params": trained[:2]}, {"params": trained[2:], "lr": 0.02}])
    if distributed:
        model, optimizer = ud.distribute(model, optimizer)
    if case.loads:
        ud.load(case.loads, model, optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(case.first, case.first + case.steps):
        if case.unfreezes and step == 2:
            model.frozen.requires_grad = True
            optimizer.add_param_group({"params": [model.frozen], "lr": 0.03})
        for turn in range(case.passes):
            rng = np.random.default_rng((7, step, turn))
            inputs, targets = rng.standard_normal((BATCH, 6)), rng.integers(0, 3, BATCH)
            each = BATCH // size
            mine = slice(rank * each, (rank + 1) * each)
            share = torch.from_numpy(inputs[mine]), torch.from_numpy(targets[mine])

            def closure(share: Any = share) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model.loss(*share) * (1 if distributed else 1 / case.passes)
                loss.backward()
                return loss

            if distributed and case.calls_closure:
                optimizer.step(closure)
                continue
            if distributed or case.passes == 1:
                closure()
            else:
                (model.loss(*share) / case.passes).backward()
            if distributed:
                optimizer.step()
        if not distributed:
            if case.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(trained, case.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        with torch.no_grad():
            assert torch.isfinite(model(share[0])).all(), "evaluation between two updates"
    if case.saves:
        ud.save(case.saves, model, optimizer)
    names = dict(model.named_parameters())
    return {name: np.array(value.detach().numpy()) for name, value in model.state_dict().items() if name in names}


def errors_of(cases: Sequence[Case]) -> list[dict[str, float]]:
    """Train each case on the ranks and in one process; returns the largest difference of each parameter.

    Every rank calls it; the outcome is of the rank's own parameters. Under "alone" is the smallest difference of
    trained parameters when the exchange is left out.
    """
    references: dict[Case, Parameters] = {}
    found = []
    for case in cases:
        steps = case.first + case.steps  # all of them in one go
        key = replace(
            case, strategy="", engine="", hosts=1, calls_closure=False, loads="", saves="", first=0, steps=steps
        )
        if key not in references:
            references[key] = train(key, distributed=False)
        expected = references[key]
        with set_variables({"UNIDIST_STRATEGY": case.strategy, "UNIDIST_ENGINE": case.engine}), host_as_accelerator():
            ud.init()
            try:
                rank, size = ud.rank(), ud.size()
                if case.hosts > 1:
                    make_believe(case.hosts)
                outcome = train(case, distributed=True, rank=rank, size=size)
            finally:
                ud.shutdown()
        errors = {name: largest_error(outcome[name], value) for name, value in expected.items()}
        if size > 1 and not found:
            apart = train(key, distributed=False, rank=rank, size=size)
            errors["alone"] = min(largest_error(apart[name], expected[name]) for name in (WATCHED & expected.keys()))
        found.append(errors)
    return found


def make_believe(num_hosts: int) -> None:
    """Let collectives go between hosts, of which there are so many in name only. Collective."""
    runtime = context.current()
    world = runtime.world.split(range(runtime.world.size))
    assert world is not None
    layout = Layout.of([rank * num_hosts // world.size for rank in range(world.size)])
    inner = world.split(layout.hosts[layout.host_of(world.rank)])
    assert inner is not None
    runtime._worlds["host"] = runtime._keep(HierarchicalCommunicator(world, inner, layout))


def record(runtime: context.Context) -> list[Record]:
    """Let every communicator that strategies ask for from now on write down what it is used for."""
    records: list[Record] = []
    make = runtime.new_communicator

    def recording(axis: str, *, memory: str = "host") -> RecordingCommunicator:
        return RecordingCommunicator(make(axis, memory=memory), records)

    runtime.new_communicator = recording  # type: ignore[method-assign]  # this run only
    return records


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
    exchange = step._shares[0].exchange
    units = model._unidist.units.units if stage == 3 else []
    moved = {"reducescatter": 0, "allgather": 0, "other": 0}
    for item in records:
        moved[item.operation if item.operation in moved else "other"] += item.nbytes
    return Footprint(
        total=total,
        parameters=sum(bucket.shard.nbytes for unit in units for bucket in unit.buckets)
        if stage == 3
        else sum(parameter.nbytes for parameter in model.parameters()),
        gradients=sum(exchange.shard(number).nbytes for number in range(len(exchange.partition.buckets)))
        if stage > 1
        else sum(cut.count * cut.dtype.itemsize for cut in exchange.partition.buckets),
        optimizer=sum(value.nbytes for run in step._runs() for value in step._inner.state(run).values() if value.dim()),
        gathered=model._unidist.units.nbytes_held if stage == 3 else 0,
        most_gathered=most,
        scattered=moved["reducescatter"],
        sent_parameters=moved["allgather"],
        other=moved["other"],
    )


def beside_fully_shard(folder: str) -> float:
    """Train with zero=3 and, independently, with PyTorch's FSDP2; returns the largest difference of a parameter."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def network() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 5), torch.nn.Linear(5, 3))

    def steps(model: Any, optimizer: Any, rank: int) -> None:
        for step in range(6):
            rng = np.random.default_rng((step, rank))
            inputs = torch.from_numpy(rng.standard_normal((4, 6))).float()
            optimizer.zero_grad()
            torch.tanh(model(inputs)).square().mean().backward()
            optimizer.step()

    with set_variables({"UNIDIST_STRATEGY": "zero=3:shared=false", "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            rank, size = ud.rank(), ud.size()
            model: Any = network()
            model, optimizer = ud.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.05))
            steps(model, optimizer, rank)
            found = model.state_dict()
        finally:
            ud.shutdown()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    try:
        mesh = init_device_mesh("cpu", (size,))
        other = network()
        for layer in other:
            fully_shard(layer, mesh=mesh)
        fully_shard(other, mesh=mesh)
        steps(other, torch.optim.AdamW(other.parameters(), lr=0.05), rank)
        expected = {name: value.full_tensor() for name, value in other.state_dict().items()}
    finally:
        dist.destroy_process_group()
    start = network().state_dict()
    assert all((start[name] - value).abs().max() > 1e-3 for name, value in expected.items()), "nothing was trained"
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())
