"""Scripts in which layers are left out, alike on both ranks or not, under ZeRO at stage 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _torch_scripts import check_equal, values

import unidist.torch as ud
from unidist.errors import MismatchError
from unidist.settings.environment import set_variables

SCRIPTS: dict[str, Callable[[], None]] = {}
GATHERING = ("zero=3:shared=false", "zero=3:prefetch=0", "zero=3:prefetch=2")


def script(function: Callable[[], None]) -> Callable[[], None]:
    """Let the tests run a function on two ranks."""
    SCRIPTS[function.__name__] = function
    return function


class Stack(torch.nn.Module):
    """Blocks of equal size, of which some are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(4))
        self.head = torch.nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, left_out: int) -> torch.Tensor:
        """Return what the others make of x."""
        for number, block in enumerate(self.blocks):
            if number != left_out:
                x = torch.tanh(block(x))
        return self.head(x)


def make() -> tuple[Any, Any]:
    """Return the model and its optimizer, always the same."""
    torch.manual_seed(0)
    model = Stack().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def step(model: Any, optimizer: Any, left_out: int) -> None:
    """Do one update."""
    inputs = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(left_out))
    model(inputs, left_out).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@script
def layers_that_all_ranks_leave_out() -> None:
    plain_model, plain = make()
    for left_out in (9, 1, 2, 0, 3, 1):
        step(plain_model, plain, left_out)
    for strategy in GATHERING:
        with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
            ud.init()
            model, optimizer = ud.distribute(*make())
            for left_out in (9, 1, 2, 0, 3, 1):
                step(model, optimizer, left_out)
            check_equal(values(model), list(plain_model.parameters()))
            ud.shutdown()


@script
def layers_that_only_one_rank_leaves_out() -> None:
    for engine in ("shm", "gloo"):
        for strategy in GATHERING:
            with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": engine}):
                ud.init()
                model, optimizer = ud.distribute(*make())
                step(model, optimizer, 9)
                with pytest.raises(MismatchError, match=r"rank 0 'blocks.2', rank 1 'blocks.1'"):
                    step(model, optimizer, 1 + ud.rank())
                ud.shutdown()


@script
def layers_that_only_one_rank_leaves_out_beside_memory_that_all_share() -> None:
    """Nothing is gathered there: a gradient that is missing on a rank counts as zeros."""
    plain_model, plain = make()
    for left_out in (1, 2):
        inputs = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(left_out))
        (plain_model(inputs, left_out).square().mean() / 2).backward()
    plain.step()
    with set_variables({"UNIDIST_STRATEGY": "zero=3:shared=true", "UNIDIST_ENGINE": "shm"}):
        ud.init()
        model, optimizer = ud.distribute(*make())
        step(model, optimizer, 1 + ud.rank())
        check_equal(values(model), list(plain_model.parameters()))
        ud.shutdown()


class Skipping(torch.nn.Module):
    """A block that returns its input as it is, if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        """Return x, or what the layer makes of it."""
        return x if skips else torch.tanh(self.inner(x))


class Headless(torch.nn.Module):
    """A model whose output is that of its last blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Skipping() for _ in range(4))

    def forward(self, x: torch.Tensor, skipped: int) -> torch.Tensor:
        """Return what the blocks make of x."""
        for number, block in enumerate(self.blocks):
            x = block(x, number >= skipped)
        return x


@script
def outputs_of_units_that_are_those_of_others() -> None:
    def train(model: Any, optimizer: Any) -> None:
        for skipped in (4, 3, 2, 4, 1):
            inputs = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(skipped))
            model(inputs, skipped).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = Headless().double()
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    plain_model, plain = made()
    train(plain_model, plain)
    for strategy in GATHERING:
        with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
            ud.init()
            model, optimizer = ud.distribute(*made())
            train(model, optimizer)
            check_equal(values(model), list(plain_model.parameters()))
            ud.shutdown()
