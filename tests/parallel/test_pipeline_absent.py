"""Parameters of other stages: using one is an error that says where it is, and torch does not see it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


USES: dict[str, Callable[[Any], Any]] = {
    ".norm": lambda p: p.norm(),
    ".grad": lambda p: p.grad,
    "norm()": lambda p: torch.norm(p),
    "add()": lambda p: torch.ones(2) + p,
    "__mul__()": lambda p: p * 2,
    "__getitem__()": lambda p: p[0],
    "linear()": lambda p: torch.nn.functional.linear(torch.ones(1, 4), p),
}


def used() -> tuple[dict[str, str], set[str], list[bool]]:
    """Use a parameter of the other stage before and after a step; return the errors, and what torch sees."""
    import unidist.torch as ud
    from unidist.errors import UsageError
    from unidist.settings.environment import set_variables

    with set_variables({"UNIDIST_STRATEGY": "pipeline=2", "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
            step = ud.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss)
            step(torch.ones(4, 4), torch.zeros(4, 4))
            model = step.model
            other = model[2 if ud.rank() == 0 else 0]
            texts = {}
            for name, use in USES.items():
                try:
                    use(other.weight)
                except UsageError as error:
                    texts[name] = str(error)
            step.predict(torch.ones(2, 4))
            names = {name for name, _ in model.named_parameters()} ^ model.state_dict().keys()
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            model.double().float().requires_grad_(True)
            facts = [hasattr(other.weight, "norm"), "elsewhere" in repr(other.weight), "bias=" in repr(model)]
            return texts, names, facts
        finally:
            ud.shutdown()


def test_a_parameter_of_another_stage_says_where_it_is(rank_pool: RankPoolFactory) -> None:
    for rank, (texts, names, facts) in enumerate(rank_pool(2).run(used)):
        for use in USES:
            path = ("2.weight", "0.weight")[rank]
            where = f"is on stage {1 - rank}, rank {1 - rank} of the pipeline"
            assert f"{use} was asked of parameter {path!r} on rank {rank} of the pipeline" in texts[use], texts
            assert where in texts[use]
            assert "\n" not in texts[use]
        assert not names
        assert facts == [False, True, True]
