"""Trainings in PyTorch with experts on the ranks of a pool, many in one call, each beside one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from whole_torch import descent_by_norms

import unidist.torch as ud
from unidist.checkpoint.format.interface import placements_of
from unidist.errors import UnidistError
from unidist.settings.environment import set_variables
from unidist.testing._training import largest_error
from unidist_expert_parallel.torch import MixtureOfExperts, auxiliary_loss
from unidist_torch.memory import dtype_of

ROWS, TOKENS, FEATURES, WIDTH, CLASSES, EXPERTS, STEPS = 16, 3, 5, 8, 4, 8, 3
MAX_NORM = 0.3
Parameters = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        layer: name of `LAYERS`.
        strategy: the strategy line.
        engine: carries everything.
        passes: calls of a step that make an update.
        uneven: ranks have different numbers of samples, the last one none.
        step: use `TrainStep` in place of a loop.
        clips: the script clips, in place of a strategy.
        twice: two backward passes before a step.
        whole: the optimizer looks at whole tensors.
        steps: updates.
        first: number of the first of them.
        loads: folder of a checkpoint to begin with.
        saves: folder for one at the end.
        limit: largest difference.
    """

    layer: str = "plain"
    strategy: str = "expert=2"
    engine: str = "shm"
    passes: int = 1
    uneven: bool = False
    step: bool = False
    clips: bool = False
    twice: bool = False
    whole: bool = False
    steps: int = STEPS
    first: int = 0
    loads: str = ""
    saves: str = ""
    limit: float = 1e-12


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH))


LAYERS: dict[str, Callable[[], MixtureOfExperts]] = {
    "plain": lambda: MixtureOfExperts(WIDTH, EXPERTS, hidden=6),
    "switch": lambda: MixtureOfExperts(
        WIDTH,
        EXPERTS,
        hidden=6,
        top_k=1,
        kind="relu",
        capacity_factor=1.0,
        balance_coefficient=0.1,
        z_coefficient=0.01,
    ),
    "limited": lambda: MixtureOfExperts(
        WIDTH, EXPERTS, hidden=6, kind="gelu", bias=True, capacity_factor=0.6, balance_coefficient=0.2
    ),
    "losses": lambda: MixtureOfExperts(
        WIDTH, EXPERTS, hidden=6, top_k=3, normalize=False, balance_coefficient=0.3, z_coefficient=0.1
    ),
    "modules": lambda: MixtureOfExperts(
        WIDTH, EXPERTS, experts=[_mlp() for _ in range(EXPERTS)], top_k=3, softmax="after", z_coefficient=0.1
    ),
    "one": lambda: MixtureOfExperts(WIDTH, EXPERTS, hidden=6, top_k=1),
}


class Block(nn.Module):
    """A block with experts; its norm leaves numbers above 0, so that a test can send all tokens to one expert."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.dense = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.experts = LAYERS[layer]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (rows, tokens, width)."""
        x = x + self.dense(x)
        found: torch.Tensor = x + self.experts(self.norm(x).abs() + 0.1)
        return found


class Model(nn.Module):
    """Two blocks with experts between two ordinary layers."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block(layer) for _ in range(2))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take (rows, tokens, features), return (rows, tokens, classes)."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.last(x)
        return found


def make(layer: str) -> Model:
    """Return the model with the same random values everywhere."""
    torch.manual_seed(0)
    model = Model(layer).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        if layer == "one":
            for block in model.blocks:
                block.experts.router.weight.fill_(-1.0)
                block.experts.router.weight[EXPERTS - 1] = 1.0
    return model


def optimizer_of(model: nn.Module, *, whole: bool = False) -> torch.optim.Optimizer:
    """Return one that moves parameters whose gradient is zero, too; or one that looks at whole tensors."""
    if whole:
        return descent_by_norms(model.parameters())
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)


def batch(step: int, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of all ranks."""
    rng = np.random.default_rng((7, step, turn))
    inputs, targets = rng.normal(size=(ROWS, TOKENS, FEATURES)), rng.normal(size=(ROWS, TOKENS, CLASSES))
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def criterion(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over all numbers."""
    return (outputs - targets).square().mean()


def losses_of(model: nn.Module) -> torch.Tensor | float:
    """Return the routers' losses of a model that has some."""
    layers = [each for each in model.modules() if isinstance(each, MixtureOfExperts)]
    return auxiliary_loss(model) if any(each.has_losses for each in layers) else 0.0


def alone(case: Case) -> tuple[Parameters, list[float]]:
    """Train in this process, without unidist; return parameters and losses."""
    model = make(case.layer)
    optimizer = optimizer_of(model, whole=case.whole)
    losses = []
    for number in range(case.first + case.steps):
        total = 0.0
        for turn in range(case.passes):
            inputs, targets = batch(number, turn)
            loss = (criterion(model(inputs), targets) + losses_of(model)) / (1 if case.twice else case.passes)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        if case.clips or "clip_norm" in case.strategy:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {name: value.detach().numpy().copy() for name, value in model.named_parameters()}, losses[case.first :]


def shares(rank: int, size: int, uneven: bool) -> slice:
    """Return this rank's rows of the batch."""
    if not uneven:
        each = ROWS // size
        return slice(rank * each, (rank + 1) * each)
    bounds = [ROWS * (number * number + 1) // ((size - 1) ** 2 + 1) for number in range(size - 1)]
    bounds = [0, *bounds[1:], ROWS, ROWS]  # the last rank has none
    return slice(bounds[rank], bounds[rank + 1])


@contextmanager
def started(strategy: str, engine: str = "shm", **variables: str) -> Iterator[None]:
    """Run a job of these ranks with a strategy line."""
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": engine, **variables}):
        ud.init()
        try:
            yield
        finally:
            ud.shutdown()


def errors_of(cases: Sequence[Case]) -> dict[str, float | str]:
    """Train each; return the largest difference from one process, or the error's text, by the case's text."""
    found: dict[str, float | str] = {}
    references: dict[Case, tuple[Parameters, list[float]]] = {}
    for case in cases:
        key = replace(
            case, strategy="clip_norm" if "clip_norm" in case.strategy else "", engine="", uneven=False, step=False,
            loads="", saves="", limit=0,
        )  # fmt: skip
        if key not in references:
            references[key] = alone(case)
        try:
            with started(case.strategy, case.engine):
                error = _error(case, *references[key])
            found[str(case)] = error if error > case.limit else 0.0
        except Exception:
            found[str(case)] = traceback.format_exc(limit=-4)
    return found


def _error(case: Case, parameters: Parameters, losses: list[float]) -> float:
    model = make(case.layer)
    optimizer = optimizer_of(model, whole=case.whole)
    rank, size = ud.data_rank(), ud.data_size()
    mine = shares(rank, size, case.uneven)

    def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = criterion(outputs, targets) if targets.numel() else outputs.sum()
        if case.uneven and not case.step:  # a loop weighs the ranks by their samples itself
            found = found * (len(targets) * size / ROWS)
        return found + losses_of(model)

    step: Any = None
    if case.step:
        step = ud.TrainStep(model, optimizer, loss_of)
        model = step.model
    else:
        model, optimizer = ud.distribute(model, optimizer)
    if case.loads:
        ud.load(case.loads, model, optimizer)
    differences = []
    for number in range(case.first, case.first + case.steps):
        total = 0.0
        for turn in range(case.passes):
            inputs, targets = batch(number, turn)
            if case.step:
                loss = step(inputs[mine], targets[mine])
            else:
                loss = loss_of(model(inputs[mine]), targets[mine])
                loss.backward()  # type: ignore[no-untyped-call]
            value = loss.detach().clone()
            if not case.step:
                value = ud.allreduce(value, name="loss")
            total += float(value) / (1 if case.twice else case.passes)
            if not (case.step or case.twice):
                if case.clips:
                    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
        if case.twice:
            optimizer.step()
            optimizer.zero_grad()
        differences.append(abs(total - losses[number - case.first]))
    if case.saves:
        ud.save(case.saves, model, optimizer)
    return max(*differences, compared(model, parameters))


def compared(model: nn.Module, parameters: Parameters) -> float:
    """Return the largest difference of this rank's parameters from those of one process."""
    places = placements_of(model)
    differences = []
    for path, value in model.named_parameters():
        place = places.placement(path, tuple(value.shape), dtype_of(value))
        expected = parameters[place.name][np.ix_(*place.indices)]
        differences.append(largest_error(value.detach().numpy(), expected))
    assert differences, "no parameter was compared"
    return max(differences)


def composed_errors(lines: Sequence[str]) -> dict[str, float | str]:
    """Train the transformer of `_torch_compositions`, with experts and their losses, under each strategy line."""
    import _torch_compositions as compositions

    class Sparse(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block
            self.experts = MixtureOfExperts(compositions.WIDTH, 4, hidden=12, **coefficients)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.block(x) + self.experts(x)
            return found

    plain = compositions.Transformer, compositions.optimizer_of, compositions.loss_of
    models: list[nn.Module] = []

    class Transformer(compositions.Transformer):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Sparse(block) for block in self.blocks)

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        models.append(model)
        return plain[1](model)

    def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return plain[2](outputs, targets) + losses_of(models[-1])

    compositions.Transformer, compositions.optimizer_of, compositions.loss_of = Transformer, optimizer_of, loss_of  # type: ignore[misc]
    found: dict[str, float | str] = {}
    coefficients: dict[str, Any] = {}
    try:
        for line in lines:
            coefficients = {} if "pipeline" in line else {"balance_coefficient": 0.1, "z_coefficient": 0.1}
            found |= compositions.errors_of([line])
    finally:
        compositions.Transformer, compositions.optimizer_of, compositions.loss_of = plain  # type: ignore[misc]
    return found


def without_exchange() -> float:
    """Return the error of a training whose routers' losses are of each rank's own tokens, which a test must notice."""
    from unidist_expert_parallel._torch.layers.axis import ExpertAxis

    case = Case("losses")
    plain, ExpertAxis.total = ExpertAxis.total, lambda self, values: values  # type: ignore[method-assign]
    try:
        with started(case.strategy):
            return _error(case, *alone(case))
    finally:
        ExpertAxis.total = plain  # type: ignore[method-assign]


def with_mean_over_holders() -> float:
    """Return the error if gradients of experts are summed over all replicas, as those of other parameters are."""
    from unidist_expert_parallel.layout.placements import ExpertParameters

    case = Case("plain")
    plain = ExpertParameters.gradient_axis
    ExpertParameters.gradient_axis = lambda self, path: self._inner.gradient_axis(path)  # type: ignore[method-assign]
    try:
        with started(case.strategy):
            return _error(case, *alone(case))
    finally:
        ExpertParameters.gradient_axis = plain  # type: ignore[method-assign]


def refusals() -> dict[str, str]:
    """Return the errors of what cannot be divided."""
    found = {}
    dense = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    listed = nn.Module()
    listed.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    tries: dict[str, tuple[str, Callable[[], nn.Module]]] = {
        "nothing": ("expert=2", lambda: dense),
        "list": ("expert=2", lambda: listed),
        "odd": ("expert=2", lambda: MixtureOfExperts(4, 7)),
        "zero": ("expert=2,zero=3", lambda: make("plain")),
        "size": ("expert=0", lambda: make("plain")),
    }
    for name, (line, build) in tries.items():
        try:
            with started(line):
                model = build()
                ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            found[name] = "accepted"
        except (UnidistError, ValueError) as error:
            found[name] = str(error)
    return found


def with_fewer_samples_than_microbatches() -> str:
    """Train a pipeline on four samples, and on two along one half of the ranks, in four micro-batches."""
    with started("expert=2,pipeline=2:microbatches=4", "shm"):
        model = nn.Sequential(make("plain"), nn.Linear(WIDTH, WIDTH).double())
        step = ud.TrainStep(model, optimizer_of(model), nn.functional.mse_loss)
        rows = torch.ones(4 - 2 * ud.data_rank(), WIDTH, dtype=torch.float64)
        try:
            step(rows, rows)
        except UnidistError as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"


def terms_of_experts() -> dict[str, str]:
    """Compute terms of weights after a step; return the errors, "" where there is none, by layer and term."""
    terms: dict[str, Callable[[Any], Any]] = {
        "L2": lambda model: sum((each**2).sum() for each in model.parameters()),
        "norms": lambda model: [each.data.norm() for each in model.parameters()],
        "product": lambda model: [each[0] @ each[0].t() for each in model.blocks[0].experts.experts.parameters()],
        "average": lambda model: [each.detach().clone().lerp_(each, 0.5) for each in model.parameters()],
        "router": lambda model: sum((each**2).sum() for each in model.blocks[0].experts.router.parameters()),
    }
    found = {}
    for layer in ("plain", "modules"):
        with started("expert=2", "shm"):
            model = make(layer)
            model, optimizer = ud.distribute(model, optimizer_of(model))
            model(batch(0, 0)[0]).sum().backward()
            optimizer.step()
            for name, term in terms.items():
                try:
                    term(model)
                    found[f"{layer} {name}"] = ""
                except UnidistError as error:
                    found[f"{layer} {name}"] = f"{type(error).__name__}: {error}"
    return found


def evaluate_on_one_rank() -> None:
    """Let rank 0 alone evaluate a model whose experts are whole, and have capacities."""
    with started("data", "shm"):
        model = make("switch")
        model, _ = ud.distribute(model, optimizer_of(model))
        if ud.rank() == 0:
            model.eval()
            with torch.no_grad():
                model(batch(0, 0)[0])
        ud.barrier()
