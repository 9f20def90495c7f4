"""`Fabric(strategy="unidist")`: the script's own loop gives the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("lightning")

from lightning_runs import distance

from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "UNIDIST_TIMEOUT_SEC": "60"}


def loop(batch_size: int, options: dict[str, Any]) -> Any:
    """Train for two epochs; `line`: the strategy line, None: this process alone, by plain Fabric."""
    import os

    import lightning
    import torch
    from lightning_runs import network, samples
    from torch.utils.data import DataLoader, DistributedSampler

    import unidist.torch as ud
    from unidist.errors import UnidistError
    from unidist.settings.environment import set_variables

    line, saved, loaded = options.get("line"), options.get("save"), options.get("load")
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.dict(os.environ), set_variables({"UNIDIST_STRATEGY": line} if line else {}):
            fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy="unidist" if line else "auto")
            fabric.launch()
            torch.manual_seed(0)
            model: Any = network()
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
            if options.get("apart"):
                fabric.setup_optimizers(optimizer)
            model, optimizer = fabric.setup(model, optimizer)
            state = {"model": model, "optimizer": optimizer, "epoch": 0}
            if loaded:
                fabric.load(loaded, state)
            data = samples()
            sampler = None if line else DistributedSampler(data, 1, 0)
            loader = fabric.setup_dataloaders(DataLoader(data, batch_size, sampler=sampler, shuffle=bool(line)))
            for epoch in range(state["epoch"], options.get("epochs", 2)):
                loader.sampler.set_epoch(epoch)
                for number, (inputs, targets) in enumerate(loader):
                    is_last = number % 2 == 1 or number == len(loader) - 1
                    with fabric.no_backward_sync(model, enabled=not is_last):
                        fabric.backward(torch.nn.functional.mse_loss(model(inputs), targets) / 2)
                    if is_last:
                        fabric.clip_gradients(model, optimizer, max_norm=0.3)
                        fabric.clip_gradients(model, optimizer, clip_val=0.1)
                        optimizer.step()
                        optimizer.zero_grad()
            if saved:
                fabric.save(saved, {**state, "epoch": options["epochs"]})
            mean = fabric.all_reduce(torch.tensor(float(fabric.global_rank)))
            found = {name: value.clone() for name, value in model.state_dict().items()}
            return found, float(mean), fabric.all_gather(torch.tensor([fabric.global_rank])).flatten().tolist()
    except UnidistError as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        torch.set_default_dtype(torch.float32)
        ud.shutdown()


def run(rank_pool: RankPoolFactory, num_ranks: int, **options: Any) -> Any:
    found = rank_pool(num_ranks, env=ENVIRONMENT).run(loop, (12 // num_ranks, options))
    assert all(isinstance(each, str) == isinstance(found[0], str) for each in found), found
    return found[0]


def alone(rank_pool: RankPoolFactory, **options: Any) -> Any:
    return rank_pool(1, env=ENVIRONMENT).run(loop, (12, options))[0]


@pytest.mark.parametrize("line", ["data", "zero=1", "zero=2", "zero=3", "zero=3:shared=false"])
def test_a_loop_of_the_scripts_own_is_that_of_one_process(line: str, rank_pool: RankPoolFactory) -> None:
    expected, _, _ = alone(rank_pool)
    found, mean, ranks = run(rank_pool, 2, line=line)
    assert distance(found, expected) < 1e-12
    assert (mean, ranks) == (0.5, [0, 1])


@pytest.mark.parametrize("line", ["zero=2", "zero=3:shared=false"])
def test_other_ranks_load_what_was_saved(line: str, rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    plain, saved = str(tmp_path / "plain.ckpt"), str(tmp_path / "saved.ckpt")
    alone(rank_pool, epochs=1, save=plain)
    expected, _, _ = alone(rank_pool, epochs=3, load=plain)  # Fabric numbers epochs anew: its order is not that of 3
    run(rank_pool, 2, line=line, epochs=1, save=saved)
    for num_ranks, other in ((3, line), (1, "data")):
        found, _, _ = run(rank_pool, num_ranks, line=other, epochs=3, load=saved)
        assert distance(found, expected) < 1e-12
    found, _, _ = alone(rank_pool, epochs=3, load=saved)
    assert distance(found, expected) < 1e-12


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"line": "pipeline=2"}, "'pipeline' runs the forward and backward passes itself"),
        ({"line": "data", "apart": True}, "model, optimizer = fabric.setup.model, optimizer."),
    ],
)
def test_what_cannot_be_is_one_line(options: dict[str, Any], text: str, rank_pool: RankPoolFactory) -> None:
    import re

    found = run(rank_pool, 2, **options)
    assert isinstance(found, str)
    assert "\n" not in found
    assert re.search(text, found)
