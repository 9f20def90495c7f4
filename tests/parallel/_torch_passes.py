"""Trainings with several backward passes before a step, as nanoGPT, Lightning and Hugging Face's Trainer make them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from _zero_cases import by_operation, record
from torch import nn

import unidist.torch as ud
from unidist.errors import UsageError
from unidist.runtime import context
from unidist.settings.environment import set_variables

STEPS, BATCH, FEATURES = 4, 8, 6


@dataclass(frozen=True)
class Case:
    """A training.

    Args:
        strategy: the line.
        syncs: for each backward pass before a step, whether it is outside of `no_sync`.
        max_norm: what the line's clip_norm says.
        precise: float64 and AdamW; else float32 and SGD, for strategies that compute in 16 bits.
        by_model: `no_sync` of the model, else of the optimizer.
        sums: gradients are added up over the ranks; the loss is that of a rank's part of the mean.
        window: the line's accumulate=.
    """

    strategy: str
    syncs: tuple[bool, ...] = (True, True)
    max_norm: float | None = None
    precise: bool = True
    by_model: bool = True
    sums: bool = False
    window: int = 1


class Block(nn.Module):
    """Two layers, one of which only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 8)
        self.down = nn.Linear(8, FEATURES)
        self.extra = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        """Return what follows."""
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.extra(x) if extra else x


class Model(nn.Module):
    """Blocks, and a head that shares no unit with them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(FEATURES, 3)

    def forward(self, x: torch.Tensor, extra: bool = True) -> torch.Tensor:
        """Return logits."""
        for block in self.blocks:
            x = block(x, extra)
        return self.head(x)


def make(case: Case) -> tuple[Any, Any]:
    """Return the model and its optimizer, always the same."""
    torch.manual_seed(5)
    model = Model().to(torch.float64 if case.precise else torch.float32)
    if case.precise:
        return model, torch.optim.AdamW(model.parameters(), lr=0.02)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(case: Case, step: int, rank: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a rank's share of the batch of each pass."""
    for turn in range(len(case.syncs)):
        generator = torch.Generator().manual_seed(100 * step + turn)
        x = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (BATCH,), generator=generator)
        rows = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        yield x[rows] if case.precise else x[rows].float(), y[rows]


def train(case: Case, model: Any, optimizer: Any, rank: int, size: int) -> None:
    """Train; every other step leaves some layers out in its first pass."""
    for step in range(STEPS):
        for turn, ((x, y), syncs) in enumerate(zip(batches(case, step, rank, size), case.syncs, strict=True)):
            owner = model if case.by_model else optimizer
            with nullcontext() if syncs else owner.no_sync():
                logits = model(x, extra=bool(step % 2) or turn > 0)
                (nn.functional.cross_entropy(logits, y) / len(case.syncs) / (size if case.sums else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def results(model: Any, case: Case) -> dict[str, torch.Tensor]:
    """Return whole parameters, where this rank has them, and outputs."""
    (x, _), *_ = batches(case, 1000, 0, 1)
    with torch.no_grad():
        found = {"outputs": model(x).double()}
    if "tensor" not in case.strategy:
        from unidist_torch.models import plain_part

        found |= {name: plain_part(value).double() for name, value in model.state_dict().items()}
    return found


def alone(case: Case) -> dict[str, torch.Tensor]:
    """Train one process on whole batches, without unidist."""
    model, optimizer = make(case)
    for step in range(STEPS):
        for turn, (x, y) in enumerate(batches(case, step, 0, 1)):
            logits = model(x, extra=bool(step % 2) or turn > 0)
            (nn.functional.cross_entropy(logits, y) / len(case.syncs) / case.window).backward()
        if (step + 1) % case.window:
            continue
        if case.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return results(model, case)


def on_rank(case: Case) -> dict[str, torch.Tensor]:
    """Train on this rank's share; returns whole parameters."""
    with set_variables({"UNIDIST_STRATEGY": case.strategy}):
        ud.init()
        try:
            model, optimizer = make(case)
            model, optimizer = ud.distribute(model, optimizer, op=ud.Sum if case.sums else ud.Average)
            axis = context.current().axis("data")
            train(case, model, optimizer, axis.rank, axis.size)
            return results(model, case)
        finally:
            ud.shutdown()


def traffic(strategy: str, syncs: tuple[bool, ...]) -> tuple[dict[str, int], list[list[float]]]:
    """Return the bytes that a step gives to each kind of collective, and what p.grad holds between its passes."""
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            records = record(context.current())
            model = nn.Linear(3, 1, bias=False).double()
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = ud.distribute(model, optimizer)
            shown = []
            for _ in range(2):
                records.clear()
                shown.clear()
                for syncs_now in syncs:
                    with nullcontext() if syncs_now else model.no_sync():
                        model(torch.full((1, 3), 1.0 + ud.rank(), dtype=torch.float64)).sum().backward()
                    if strategy == "data":
                        shown.append(model.weight.grad.flatten().tolist())
                optimizer.step()
                optimizer.zero_grad()
            return by_operation(records), shown
        finally:
            ud.shutdown()


def dropped(strategy: str, by_optimizer: bool, syncs: bool) -> str:
    """Drop the gradients of a pass, and train on; returns the error, or "" where the numbers are right."""
    with set_variables({"UNIDIST_STRATEGY": strategy}):
        ud.init()
        try:
            model = nn.Linear(3, 1, bias=False).double()
            nn.init.zeros_(model.weight)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
            model, optimizer = ud.distribute(model, optimizer)
            with nullcontext() if syncs else optimizer.no_sync():
                model(torch.full((1, 3), 7.0, dtype=torch.float64)).sum().backward()
                (optimizer if by_optimizer else model).zero_grad()
            try:
                model(torch.full((1, 3), 1.0, dtype=torch.float64)).sum().backward()
            except UsageError as exc:
                return str(exc)
            optimizer.step()
            assert torch.equal(model.weight.detach(), -torch.ones(1, 3, dtype=torch.float64)), model.weight
            return ""
        finally:
            ud.shutdown()


def joins(strategy: str) -> list[float]:
    """Train with two passes a step, for more steps on rank 0; the gradients of a rank that has left count as zeros."""
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
            model = nn.ParameterDict({"weight": weight})
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
            _, optimizer = ud.distribute(model, optimizer)
            for _ in range(4 - 2 * ud.rank()):
                for _ in range(2):
                    weight.sum().backward()
                optimizer.step()
            ud.join()
            return weight.tolist()
        finally:
            ud.shutdown()
