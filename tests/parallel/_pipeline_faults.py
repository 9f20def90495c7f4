"""What ranks of a pipeline see when one of them cannot go on. Run on the ranks of a pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress

import torch

import unidist.torch as ud
from unidist.runtime import context
from unidist.settings.environment import set_variables

WIDTH, SAMPLES = 4, 8


class Surprising(torch.nn.Module):
    """A layer that does something unexpected in one of its calls.

    Args:
        surprise: what it does.
        call: in which.
    """

    def __init__(self, surprise: Callable[[torch.Tensor], torch.Tensor], call: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.surprise = surprise
        self.calls_left = call

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, or whatever the surprise does."""
        hidden = self.layer(hidden)
        self.calls_left -= 1
        return self.surprise(hidden) if self.calls_left == 0 else hidden


def fail(hidden: torch.Tensor) -> torch.Tensor:
    """Raise what a script might."""
    raise ValueError("no such word")


def die(hidden: torch.Tensor) -> torch.Tensor:
    """End this process, as a machine that is switched off."""
    os.kill(os.getpid(), signal.SIGKILL)
    return hidden


def lengthen(hidden: torch.Tensor) -> torch.Tensor:
    """Return something of another shape than in the calls before."""
    return torch.cat([hidden, hidden], dim=1)


def train(engine: str, strategy: str, surprise: Callable[[torch.Tensor], torch.Tensor], call: int) -> tuple[str, str]:
    """Train until something happens; returns the type and the text of the error."""
    settings = {"UNIDIST_ENGINE": engine, "UNIDIST_STRATEGY": strategy, "UNIDIST_TIMEOUT_SEC": "60"}
    with set_variables({**settings, "UNIDIST_VERIFY": "off"}):  # the passes of training alone are counted
        ud.init()
        try:
            layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2 * ud.size())]
            layers[3] = Surprising(surprise, call)
            model = torch.nn.Sequential(*layers)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = ud.TrainStep(model, optimizer, torch.nn.functional.mse_loss)
            inputs = torch.ones(SAMPLES, WIDTH)
            for _ in range(4):
                step(inputs, inputs)
        except Exception as error:
            return type(error).__name__, str(error)
        finally:
            ud.shutdown()
    return "nothing", ""


def raises(engine: str, strategy: str, call: int) -> tuple[str, str]:
    """The second stage raises in one of its forward passes."""
    return train(engine, strategy, fail, call)


def adds_weights_to_the_loss() -> tuple[str, str]:
    """The loss has a term of the weights."""
    with set_variables({"UNIDIST_ENGINE": "shm", "UNIDIST_STRATEGY": "pipeline=2:microbatches=2"}):
        ud.init()
        try:
            model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)))

            def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
                penalty = torch.stack([each.square().sum() for each in model.parameters()]).sum()
                return torch.nn.functional.mse_loss(outputs, targets) + 0.1 * penalty

            step = ud.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
            inputs = torch.ones(SAMPLES, WIDTH)
            step(inputs, inputs)
        except Exception as error:
            return type(error).__name__, str(error)
        finally:
            ud.shutdown()
    return "nothing", ""


def changes_shape(engine: str, strategy: str) -> tuple[str, str]:
    """The second stage returns another shape in the second step."""
    return train(engine, strategy, lengthen, 6)


def dies(engine: str, strategy: str, call: int, victim: int, rank: int) -> tuple[str, str]:
    """The process of the second stage is killed in a forward pass; a child of the pool's stands in for it."""
    if rank != victim:
        return train(engine, strategy, die, call)
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            torch.set_num_threads(1)
            train(engine, strategy, die, call)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    next(context._epochs)  # of the runtime that the child had in place of this process: the ranks count them alike
    return "died", str(os.WTERMSIG(status) if os.WIFSIGNALED(status) else status)


def trains_on_other_data(engine: str) -> tuple[str, str]:
    """Each rank has drawn its own batch, of the same shape."""
    with set_variables({"UNIDIST_ENGINE": engine, "UNIDIST_STRATEGY": "pipeline=2:microbatches=2"}):
        ud.init()
        try:
            model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
            step = ud.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)
            data = torch.utils.data.TensorDataset(torch.arange(64.0 * WIDTH).reshape(64, WIDTH))
            sampler = torch.utils.data.DistributedSampler(data, ud.size(), ud.rank())
            for (batch,) in torch.utils.data.DataLoader(data, 8, sampler=sampler):
                step(batch, batch)
        except Exception as error:
            return type(error).__name__, str(error)
        finally:
            ud.shutdown()
    return "nothing", ""


def differs(engine: str) -> tuple[str, str]:
    """One rank passes another batch than the others; afterwards all go on."""
    with set_variables({"UNIDIST_ENGINE": engine, "UNIDIST_STRATEGY": "pipeline=2:microbatches=2"}):
        ud.init()
        try:
            model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
            step = ud.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)
            try:
                step(torch.ones(4 + context.current().topology.rank, WIDTH), torch.ones(4, WIDTH))
            except Exception as error:
                found = type(error).__name__, str(error)
            else:
                found = "nothing", ""
            assert torch.isfinite(step(torch.ones(4, WIDTH), torch.ones(4, WIDTH)))
            return found
        finally:
            ud.shutdown()
