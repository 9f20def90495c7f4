"""Statistics and codebooks of a model are the same on all ranks when it is evaluated and saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _training import data, runtime, share
from torch import nn

import unidist.torch as ud
from unidist.errors import ConfigurationError
from unidist.jobs.pool.pool import RankPool

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel
FEATURES, CLASSES = 6, 3


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def trained(strategy: str, *, in_loop: bool, **options: Any) -> list[Any]:
    """Return the buffers of this rank after each of three updates."""
    with runtime():
        model = network()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if in_loop:
            model, optimizer = ud.distribute(model, optimizer, strategy, **options)
        else:
            step = ud.TrainStep(model, optimizer, nn.functional.cross_entropy, strategy, **options)
        found = []
        for x, y in list(zip(*data(), strict=True))[:3]:
            x, y = share(x, ud.rank(), 2), share(y, ud.rank(), 2)
            if in_loop:
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                step(x, y)
            found.append({name: each.clone().tolist() for name, each in model.named_buffers()})
        return found


@pytest.mark.parametrize(
    ("strategy", "in_loop"), [("data", True), ("zero=1", True), ("zero=3:shared=false", False), ("data", False)]
)
def test_statistics_are_the_same_after_each_update(pool: Pool, strategy: str, in_loop: bool) -> None:
    first, second = pool(2).run(trained, (strategy,), {"in_loop": in_loop})
    assert first == second
    assert first[0]["1.running_mean"] != first[1]["1.running_mean"]
    assert first[-1]["1.num_batches_tracked"] == 3


def test_the_mean_is_that_of_the_ranks_own(pool: Pool) -> None:
    kept, _ = pool(2).run(trained, ("data",), {"in_loop": True})
    first, second = pool(2).run(trained, ("data",), {"in_loop": True, "buffers": "own"})
    assert first != second
    mean = [(a + b) / 2 for a, b in zip(first[-1]["1.running_mean"], second[-1]["1.running_mean"], strict=True)]
    torch.testing.assert_close(kept[-1]["1.running_mean"], mean, rtol=1e-12, atol=1e-12)
    given, got = pool(2).run(trained, ("data",), {"in_loop": True, "buffers": "rank0"})
    assert given == got == first


def test_an_unknown_rule_is_refused_before_anything_is_bound(pool: Pool) -> None:
    def on_rank() -> str:
        with runtime():
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with pytest.raises(ConfigurationError, match="unknown buffers= 'all'") as caught:
                ud.distribute(model, optimizer, buffers="all")  # type: ignore[arg-type]
            assert not hasattr(optimizer, "_unidist")
            return str(caught.value)

    assert all("rank0" in text for text in pool(2).run(on_rank))
