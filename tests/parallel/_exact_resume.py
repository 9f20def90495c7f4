"""A training that is resumed in the middle of an epoch, for `test_exact_resume`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import unidist.torch as ud
from unidist.settings import set_variables

SAVED, STEPS = 3, 6
"""Number of the steps before the checkpoint, and of all: the second epoch begins in between."""


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples that come one after the other."""

    def __iter__(self) -> Any:
        """Return the samples."""
        return iter(_samples())


@contextmanager
def _job(strategy: str) -> Iterator[None]:
    with set_variables({"UNIDIST_STRATEGY": strategy}):
        ud.init()
        try:
            yield
        finally:
            ud.shutdown()


class _Training:
    """Everything that a script has: model with dropout, optimizer, scheduler, loader."""

    def __init__(self, seed: int, *, with_step: bool, is_stream: bool) -> None:
        self.with_step = with_step
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 4)]
        self.model: Any = torch.nn.Sequential(*layers)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        dataset: Any = Stream() if is_stream else _samples()
        self.loader: Any = ud.shard(torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=not is_stream))
        ud.seed(seed)
        if self.with_step:
            self.step: Any = ud.TrainStep(self.model, self.optimizer, torch.nn.functional.cross_entropy)
        else:
            self.model, self.optimizer = ud.distribute(self.model, self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def train(self, x: Any, y: Any) -> float:
        """Train on a batch; return the loss of this rank."""
        if self.with_step:
            loss = float(self.step(x, y))
        else:
            output = torch.nn.functional.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            output.backward()
            self.optimizer.step()
            loss = float(output)
        self.scheduler.step()
        return loss

    def batches(self) -> Any:
        """Return the batches of one epoch after the other."""
        return itertools.chain.from_iterable(iter(self.loader) for _ in itertools.count())


def _samples() -> Any:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, 8, generator=generator)
    return list(zip(x, torch.randint(4, (32,), generator=generator), strict=True))


def resumed(strategy: str, folder: Path, asynchronous: bool = False, is_stream: bool = False) -> list[list[float]]:
    """Return the losses of the steps after the checkpoint: undisturbed, undisturbed once more, and resumed."""
    found = []
    for run in range(3):
        with _job(strategy):
            training = _Training(7 + run // 2, with_step="pipeline" in strategy, is_stream=is_stream)
            first = 0
            if run == 2:
                loaded = ud.load(folder, training.model, training.optimizer, rng=True)
                training.loader.load_state_dict(loaded.extra["loader"])
                training.scheduler.load_state_dict(loaded.extra["scheduler"])
                first = SAVED
            losses = []
            for step, (x, y) in zip(range(first, STEPS), training.batches(), strict=False):
                losses.append(training.train(x, y))
                if step + 1 == SAVED and run == 0:
                    extra = {"loader": training.loader.state_dict(), "scheduler": training.scheduler.state_dict()}
                    ud.save(
                        folder, training.model, training.optimizer, extra=extra, rng=True, asynchronous=asynchronous
                    )
            found.append(losses[-(STEPS - SAVED) :])
    return found
