"""A transformer on samples of variable length, in batches that fill a budget of tokens, for ranks of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from _torch_compositions import IGNORED, PADDING, VOCABULARY, loss_of, make, optimizer_of

import unidist.torch as ud
from unidist.settings.environment import set_variables

COUNT, MAX_TOKENS = 60, 64
LENGTHS = [int(each) for each in np.random.default_rng(3).integers(2, 17, COUNT)]
Sample = tuple[torch.Tensor, torch.Tensor]


def sample(index: int) -> Sample:
    """Return tokens and targets, of which the first counts for nothing."""
    generator = np.random.default_rng((11, index))
    tokens, targets = (torch.from_numpy(generator.integers(1, VOCABULARY, LENGTHS[index])) for _ in range(2))
    targets[0] = IGNORED
    return tokens, targets


def padded(samples: Sequence[Sample]) -> Sample:
    """Return a batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    tokens, targets = zip(*samples, strict=True)
    return pad(list(tokens), True, PADDING), pad(list(targets), True, IGNORED)


def count(targets: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens that count."""
    return (targets != IGNORED).sum()


def loader_of() -> Any:
    """Return the loader of this rank."""
    data: Any = [(index, *sample(index)) for index in range(COUNT)]
    loader: Any = torch.utils.data.DataLoader(data, shuffle=True, collate_fn=list)
    return ud.shard(loader, cost=LENGTHS, max_tokens=MAX_TOKENS, window=30)


def trained(line: str, *, weighted: bool = True) -> tuple[list[float], list[list[int]]]:
    """Train one epoch under a strategy line; return the losses, and the samples of this rank in each step."""
    with set_variables({"UNIDIST_STRATEGY": line, "UNIDIST_ENGINE": "shm", "UNIDIST_VERIFY": "off"}):
        ud.init()
        try:
            model = make()
            step = ud.TrainStep(model, optimizer_of(model), loss_of, weight=count if weighted else None)
            losses, seen = [], []
            for batch in loader_of():
                seen.append([index for index, _, _ in batch])
                losses.append(float(step(*padded([(tokens, targets) for _, tokens, targets in batch]))))
            return losses, seen
        finally:
            ud.shutdown()


def alone(steps: Sequence[Sequence[int]]) -> list[float]:
    """Return the losses of one process that trains on these samples in each step."""
    model = make()
    optimizer = optimizer_of(model)
    losses = []
    for indices in steps:
        tokens, targets = padded([sample(index) for index in indices])
        loss = loss_of(model(tokens), targets)
        losses.append(float(loss.detach()))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return losses
