"""A checkpoint of any number of ranks loads on any other, and training goes on as if it had never stopped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

from unidist.errors import CheckpointError, RemoteError
from unidist.jobs.pool.pool import RankPool
from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the training is in PyTorch")
pytestmark = pytest.mark.parallel
STEPS, BATCH = 4, 8


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


def train(
    load_from: str | None, save_to: str | None, *, first: int, steps: int, asynchronous: bool = False
) -> tuple[list[float], dict[str, Any]]:
    """Train on this rank's share of each batch; return the losses over the whole batches, and the parameters."""
    import torch

    import unidist.torch as ud

    torch.set_num_threads(1)
    ud.init()
    try:
        torch.manual_seed(0 if load_from is None else 99)  # what is loaded must not have been there before
        model: Any = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
        model, optimizer = ud.distribute(model, optimizer)
        if load_from is not None:
            loaded = ud.load(load_from, model, optimizer, rng=True)
            assert loaded.extra["next_step"] == first
        losses = []
        for step in range(first, first + steps):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64)
            with torch.no_grad():
                losses.append(float((model(inputs).squeeze(1) - inputs.sum(1)).square().mean()))
            share = inputs[ud.rank() :: ud.size()]
            optimizer.zero_grad()
            (model(share).squeeze(1) - share.sum(1)).square().mean().backward()
            optimizer.step()
        if save_to is not None:
            ud.save(save_to, model, optimizer, extra={"next_step": first + steps}, rng=True, asynchronous=asynchronous)
        return losses, {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    finally:
        ud.shutdown()


def test_training_goes_on_at_another_number_of_ranks(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    def run(size: int, load_from: str | None, save_to: str | None, *, first: int, steps: int = STEPS) -> Any:
        path = [None if name is None else str(tmp_path / name) for name in (load_from, save_to)]
        options = {"first": first, "steps": steps, "asynchronous": size == 4}
        outcomes = rank_pool(size).run(train, path, options)
        for losses, parameters in outcomes[1:]:
            assert losses == outcomes[0][0]
            assert all(np.array_equal(value, outcomes[0][1][name]) for name, value in parameters.items())
        return outcomes[0]

    losses, parameters = run(1, None, None, first=0, steps=2 * STEPS)
    run(4, None, "from4", first=0)
    run(2, None, "from2", first=0)
    for size, source in ((2, "from4"), (4, "from2"), (1, "from2")):
        continued, reached = run(size, source, None, first=STEPS)
        np.testing.assert_allclose(continued, losses[STEPS:], rtol=0, atol=1e-12)
        for name, value in parameters.items():
            np.testing.assert_allclose(reached[name], value, rtol=0, atol=1e-12)
    assert min(losses[STEPS:]) < 0.9 * losses[0]  # it does train
    assert len(list((tmp_path / "from4").glob("shard-*"))) == 4


def fail_on_rank_1(path: str) -> tuple[str, bool]:
    """Load into a model that is another one on rank 1; return the error, and whether the model is as it was."""
    import torch

    import unidist.torch as ud

    ud.init()
    try:
        model = torch.nn.Linear(3, 2 + ud.rank())
        before = model.weight.clone()
        try:
            ud.load(path, model)
        except CheckpointError as exc:
            return str(exc), torch.equal(model.weight, before)
        return "", False
    finally:
        ud.shutdown()


def save_one(path: str) -> None:
    """Save a small model."""
    import torch

    import unidist.torch as ud

    ud.init()
    ud.save(path, torch.nn.Linear(3, 2))
    ud.shutdown()


def test_what_does_not_fit_on_one_rank_changes_nothing_on_any(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    pool = rank_pool(2)
    pool.run(save_one, (str(tmp_path / "c"),))
    for message, unchanged in pool.run(fail_on_rank_1, (str(tmp_path / "c"),)):
        assert "'weight' float32[2, 3], here [3, 3]" in message
        assert unchanged


def save_and_die(path: str, rank_that_dies: int | None) -> str:
    """Save from the core alone; one rank is killed while it writes. Returns the error that another rank has."""
    import os
    import signal

    from unidist.buffer import Buffer
    from unidist.checkpoint import saving
    from unidist.checkpoint.format.interface import MemoryState
    from unidist.checkpoint.format.pieces import Piece
    from unidist.checkpoint.save_request import SaveOptions
    from unidist.errors import PeerLostError
    from unidist.runtime import context

    runtime = context.init()
    rank = runtime.topology.rank
    if rank == rank_that_dies:

        def killed(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        saving.write = killed  # type: ignore[assignment]
    state = MemoryState([Piece.whole("x", (4,), Buffer.of(bytearray(4)))])
    try:
        saving.Saver(runtime.duplicate_world(), {}).save(SaveOptions(Path(path)), lambda: {"model": state}, {})
    except PeerLostError as exc:
        (Path(path).parent / f"raised_on_{rank}").write_text(str(exc))
    finally:
        context.shutdown()
    return "survived"


def test_a_rank_that_dies_while_it_saves_is_reported_to_the_others(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with RankPool(2, env={"UNIDIST_TIMEOUT_SEC": "30"}) as pool:
        pool.run(save_and_die, (str(path), None))
        before = {child.name: child.read_bytes() for child in path.iterdir()}
        with pytest.raises(RemoteError, match="rank 1"):
            pool.run(save_and_die, (str(path), 1))
    assert "1" in (tmp_path / "raised_on_0").read_text()
    assert {child.name: child.read_bytes() for child in path.iterdir()} == before


def save_for_ever(path: str, delay_sec: float, victim: int) -> None:
    """Save models that are full of the number of the save, until one rank kills itself after `delay_sec`."""
    import os
    import signal
    import threading

    import torch

    import unidist.torch as ud

    ud.init()
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(40)).sum().backward()
    optimizer.step()
    first = int(ud.load(path).step or 0) + 1 if Path(path).exists() else 1
    if ud.rank() == victim:
        threading.Timer(delay_sec, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for number in range(first, first + 10_000):
        with torch.no_grad():
            for value in (*model.parameters(), *(each["exp_avg"] for each in optimizer.state.values())):
                value.fill_(number)
        ud.save(path, model, optimizer, step=number, keep=2, asynchronous=number % 3 == 0)


def load_whole(path: str) -> tuple[int, set[float]]:
    """Load what `save_for_ever` saved; return the number of the save, and all numbers that are in it."""
    import torch

    import unidist.torch as ud

    ud.init()
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.Adam(model.parameters())
    number = ud.load(path, model, optimizer).step
    ud.shutdown()
    values = [*model.parameters(), *(each["exp_avg"] for each in optimizer.state.values())]
    assert number is not None
    return number, {element for value in values for element in value.detach().reshape(-1).tolist()}


@pytest.mark.soak
def test_kill_at_random_moments_leaves_a_complete_checkpoint(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    """What `tests/unidist/checkpoint/test_killed.py` does quickly, here with torch and two ranks."""
    path, last = tmp_path / "run", 0
    chance = random.Random(1)
    for _ in range(50):
        with RankPool(2) as pool, pytest.raises(RemoteError):
            pool.run(save_for_ever, (str(path), chance.uniform(0.1, 1.0), chance.randrange(2)))
        number, found = rank_pool(1).run(load_whole, (str(path),))[0]
        assert number >= last
        assert found == {float(number)}
        last = number
    assert last > 50
