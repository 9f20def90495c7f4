"""Checkpoints of an object around the model that was distributed: whole tensors, as of the model itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from part_pools import PartOfPool

pytestmark = pytest.mark.parallel


def trained_holder(strategy: str, folder: str) -> float:
    """Distribute a module of a model, save the model, and load it whole; return how far it is from one process."""
    import torch

    import unidist.torch as ud

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.GELU(), torch.nn.Linear(9, 4))
            self.scale = torch.nn.Parameter(torch.full((4,), 2.0), requires_grad=False)

    def optimizer_of(model: Any) -> Any:
        return torch.optim.Adam(model.net.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any) -> None:
        x = torch.linspace(-1, 1, 8).reshape(2, 4)
        (model.net(x) * model.scale).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    alone = Holder()
    alone_optimizer = optimizer_of(alone)
    for _ in range(2):
        step(alone, alone_optimizer)
    ud.init()
    try:
        model = Holder()
        optimizer = optimizer_of(model)
        model.net, optimizer = ud.distribute(model.net, optimizer, strategy)
        step(model, optimizer)
        ud.save(folder, model, optimizer)
        # Into a plain one, and back into a distributed one.
        plain, again = Holder(), Holder()
        plain_optimizer, again_optimizer = optimizer_of(plain), optimizer_of(again)
        again.net, again_optimizer = ud.distribute(again.net, again_optimizer, strategy)
        ud.load(folder, plain, plain_optimizer)
        step(plain, plain_optimizer)
        ud.load(folder, again, again_optimizer)
        step(again, again_optimizer)
        ud.save(folder, again)
        ud.load(folder, loaded := Holder())
        pairs = [*zip(alone.parameters(), plain.parameters(), strict=True)]
        pairs += zip(alone.parameters(), loaded.parameters(), strict=True)
        return max(float((one - other).abs().max()) for one, other in pairs)
    finally:
        ud.shutdown()


@pytest.mark.parametrize("strategy", ["data", "tensor=2", "zero=2", "zero=3:shared=true", "zero=3:shared=false"])
def test_a_model_around_the_distributed_one_is_saved_and_loaded_whole(
    pool: Callable[..., PartOfPool], strategy: str, tmp_path: Path
) -> None:
    for distance in pool(2).run(trained_holder, (strategy, str(tmp_path / "run"))):
        assert distance < 1e-5
