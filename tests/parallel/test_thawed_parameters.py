"""A parameter that is frozen while a checkpoint is saved and loaded goes on with its optimizer's state once thawed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.parallel

OPTIMIZERS = {"Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1}, "Adam": {"lr": 0.01}}
LINES = [
    ("data", "zero=1", "zero=2"),
    ("zero=1:shared=false", "zero=3", "data"),
    ("zero=2", "zero=3:shared=false", "zero=1"),
]


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


def network(frozen: bool) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).double()
    model[1].requires_grad_(not frozen)
    return model


def train(model: Any, optimizer: Any, steps: range, rank: int, size: int) -> None:
    for step in steps:
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x[rank::size]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def alone(kind: str) -> dict[str, Any]:
    model = network(frozen=False)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **OPTIMIZERS[kind])
    for frozen, steps in ((False, range(2)), (True, range(2, 5)), (False, range(5, 7))):
        model[1].requires_grad_(not frozen)
        train(model, optimizer, steps, 0, 1)
    found: dict[str, Any] = model.state_dict()
    return found


def in_three_jobs(kind: str, lines: tuple[str, str, str], folder: str) -> float:
    """Train, save while a layer is frozen, go on twice, and thaw it; return how far that is from one process."""
    import unidist.torch as ud
    from unidist.settings.environment import set_variables

    for job, line in enumerate(lines):
        with set_variables({"UNIDIST_STRATEGY": line, "UNIDIST_ENGINE": "shm"}):
            ud.init()
            try:
                model = network(frozen=job > 0)
                optimizer = getattr(torch.optim, kind)(model.parameters(), **OPTIMIZERS[kind])
                model, optimizer = ud.distribute(model, optimizer)
                if job:
                    ud.load(f"{folder}/{job - 1}", model, optimizer)
                else:
                    train(model, optimizer, range(2), ud.rank(), ud.size())
                    model[1].requires_grad_(False)
                train(model, optimizer, range(2 + job, 3 + job), ud.rank(), ud.size())
                if job < 2:
                    ud.save(f"{folder}/{job}", model, optimizer)
                else:
                    model[1].requires_grad_(True)
                    train(model, optimizer, range(5, 7), ud.rank(), ud.size())
                state = model.state_dict()
            finally:
                ud.shutdown()
    return max(float((state[name] - value).abs().max()) for name, value in alone(kind).items())


@pytest.mark.parametrize("lines", LINES, ids="-".join)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_as_in_one_process(
    rank_pool: RankPoolFactory, tmp_path: Path, kind: str, lines: tuple[str, str, str]
) -> None:
    for error in rank_pool(2).run(in_three_jobs, (kind, lines, str(tmp_path))):
        assert error < 1e-12
