"""Trainings in PyTorch whose gradients are clipped: over ranks by a strategy, and in one process by PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import unidist.torch as ud
from unidist.settings.environment import set_variables

STEPS, BATCH, ROWS, WIDTH, CLASSES = 6, 12, 20, 5, 3


ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""Where a rank of a pool is: in a world of its own. One process less is started for a world of one rank."""


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        strategy: the strategy line.
        clip: what PyTorch does in one process: pairs of a function of `torch.nn.utils` and its arguments.
        passes: calls of `step` that make one update.
        sparse: the embedding has sparse gradients.
        as_dense: they travel as dense ones.
    """

    strategy: str
    clip: tuple[tuple[str, tuple[float, ...]], ...]
    passes: int = 1
    sparse: bool = False
    as_dense: bool = False


class Model(torch.nn.Module):
    """An embedding, a hidden layer, a frozen and an unused parameter, and one in float32 that counts in the norm."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.embedding = torch.nn.Embedding(ROWS, WIDTH, sparse=sparse, _weight=weight(ROWS, WIDTH).data)
        self.inner = weight(WIDTH, 7)
        self.head = weight(7, CLASSES)
        self.frozen = weight(3)
        self.frozen.requires_grad = False
        self.unused = weight(2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.embedding(words).sum(1) @ self.inner) @ self.head


def train_over_ranks(cases: Sequence[Case], *, alone: bool = False) -> list[dict[str, Any]]:
    """Train with unidist, one case after another, or each rank alone with it; return the parameters of each."""
    results = []
    place = {f"UNIDIST_{name}": value for name, value in ALONE.items()} if alone else {}
    for case in cases:
        with set_variables({"UNIDIST_STRATEGY": case.strategy, **place}):
            ud.init()
            try:
                model: Any = Model(case.sparse)
                optimizer: Any = _optimizer(model)
                if case.as_dense:
                    optimizer = ud.DistributedOptimizer(optimizer, sparse_as_dense=True)
                else:
                    model, optimizer = ud.distribute(model, optimizer)
                _train(model, optimizer, case, ud.rank(), ud.size())
            finally:
                ud.shutdown()
        results.append(_values(model))
    return results


def train_in_one_process(cases: Sequence[Case], share: tuple[int, int] = (0, 1)) -> list[dict[str, Any]]:
    """Train without unidist, on everything or on one rank's share: whole windows are one batch."""
    results = []
    for case in cases:
        model = Model(case.sparse and not case.clip)
        optimizer = _optimizer(model)
        rank, size = share
        for words, labels in _windows(case, rank, size):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(words) * 3, labels).backward()
            for name, arguments in case.clip:
                getattr(torch.nn.utils, name)([p for p in model.parameters() if p.grad is not None], *arguments)
            optimizer.step()
        results.append(_values(model))
    return results


def _train(model: Any, optimizer: Any, case: Case, rank: int, size: int) -> None:
    for words, labels in _windows(case, rank, size):
        for mine_words, mine_labels in zip(words.chunk(case.passes), labels.chunk(case.passes), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(mine_words) * 3, mine_labels).backward()
            optimizer.step()


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.0)


def _windows(case: Case, rank: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(3)
    windows = []
    for _ in range(STEPS):
        words = torch.from_numpy(rng.integers(0, ROWS, (BATCH * case.passes, 4)))
        labels = torch.from_numpy(rng.integers(0, CLASSES, BATCH * case.passes))
        windows.append((words.chunk(size)[rank], labels.chunk(size)[rank]))
    return windows


def _values(model: Any) -> dict[str, Any]:
    return {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
