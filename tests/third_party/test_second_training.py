"""A framework of a third party beside training: checkpoints, elastic jobs, `join`, and verification."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_job import ElasticJob
from part_pools import PartPools

from unidist.errors import MismatchError
from unidist.runtime import context
from unidist.settings.environment import set_variables

pytestmark = pytest.mark.parallel

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


def linear(seed: int = 0) -> Any:
    """Return a model with the arrays of `torch.nn.Linear(3, 2)`, without a frozen one."""
    from unidist_second import Model

    class Linear(Model):
        def __init__(self) -> None:
            generator = np.random.default_rng(seed)
            self.arrays = {"weight": generator.standard_normal((2, 3)), "bias": generator.standard_normal(2)}

        def gradients(self, inputs: Array, targets: Array) -> dict[str, Array]:
            error = 2 / targets.size * (inputs @ self.arrays["weight"].T + self.arrays["bias"] - targets)
            return {"weight": error.T @ inputs, "bias": error.sum(axis=0)}

    return Linear()


def batch(step: int, rank: int = 0, size: int = 1) -> tuple[Array, Array]:
    """Return a rank's share of a batch of six."""
    generator = np.random.default_rng([step, 7])
    return generator.standard_normal((6, 3))[rank::size], generator.standard_normal((6, 2))[rank::size]


def alone(steps: range, model: Any = None, optimizer: Any = None) -> tuple[Any, Any]:
    """Train in one process, without unidist."""
    from unidist_second import SGD

    model = model or linear()
    optimizer = optimizer or SGD(model.arrays, lr=0.1, momentum=0.9)
    for step in steps:
        optimizer.step(model.gradients(*batch(step)))
    return model, optimizer


def on_ranks(strategy: str, folder: str, *, resume: bool) -> dict[str, Array]:
    """Train three steps and save, or load and train three more."""
    from unidist_second import SGD, distribute, load, save

    with set_variables({"UNIDIST_STRATEGY": strategy}):
        runtime = context.init()
        try:
            model = linear(seed=5 if resume else runtime.topology.rank)
            optimizer = SGD(model.arrays, lr=0.5 if resume else 0.1, momentum=0.9)
            distribute(model, optimizer)
            if resume:
                assert load(folder, model, optimizer) == 3
            for step in range(3, 6) if resume else range(3):
                optimizer.step(model.gradients(*batch(step, runtime.topology.rank, runtime.topology.world_size)))
            if not resume:
                save(folder, model, optimizer, step=3)
            return dict(model.arrays)
        finally:
            context.shutdown()


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("data", "zero=1"), ("zero=1", "data"), ("zero=2", "zero=1")])
def test_a_checkpoint_is_loaded_under_another_strategy_by_more_ranks(
    rank_pools: PartPools, tmp_path: Path, saved_by: str, loaded_by: str
) -> None:
    rank_pools.get(2).run(on_ranks, (saved_by, str(tmp_path)), {"resume": False})
    expected, _ = alone(range(6))
    for found in rank_pools.get(3).run(on_ranks, (loaded_by, str(tmp_path)), {"resume": True}):
        for name, array in expected.arrays.items():
            np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-14)


@pytest.mark.parametrize("strategy", ["data", "zero=1"])
def test_torch_goes_on_from_a_checkpoint_of_numpy(rank_pools: PartPools, tmp_path: Path, strategy: str) -> None:
    torch = pytest.importorskip("torch")
    rank_pools.get(2).run(on_ranks, (strategy, str(tmp_path)), {"resume": False})

    def resume() -> dict[str, Array]:
        import unidist.torch as ud

        ud.init()
        try:
            model = torch.nn.Linear(3, 2, dtype=torch.float64)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            assert ud.load(str(tmp_path), model, optimizer).step == 3
            for step in range(3, 6):
                x, y = (torch.tensor(each) for each in batch(step))
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
            return {name: each.detach().numpy().copy() for name, each in model.named_parameters()}
        finally:
            ud.shutdown()

    expected, _ = alone(range(6))
    [found] = rank_pools.get(1).run(resume)
    for name, array in expected.arrays.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-14)


@pytest.mark.parametrize("strategy", ["data", "zero=1", "accumulate=2"])
def test_a_step_of_batches_of_different_size_is_that_of_one_process(rank_pools: PartPools, strategy: str) -> None:
    def loss_of(model: Any, inputs: Array, targets: Array) -> float:
        return float(np.mean((inputs @ model.arrays["weight"].T + model.arrays["bias"] - targets) ** 2))

    def on_rank() -> tuple[list[float], dict[str, Array], Any]:
        from unidist_second import SGD, TrainStep

        runtime = context.init()
        try:
            model, rank = linear(seed=runtime.topology.rank), runtime.topology.rank
            step = TrainStep(model, SGD(model.arrays, lr=0.1, momentum=0.9), loss_of, strategy)
            rows = slice(0, 5) if rank == 0 else slice(5, 6)
            losses = [step(*(each[rows] for each in batch(index // 2))) for index in range(4)]
            losses.append(step.evaluate(*(each[rows] for each in batch(7))))
            told = runtime.progress
            return losses, dict(model.arrays), (told._values, told.samples)
        finally:
            context.shutdown()

    model, optimizer = alone(range(0))
    wanted = []
    for index in range(4):
        wanted.append(loss_of(model, *batch(index // 2)))
        if strategy != "accumulate=2" or index % 2:  # both passes of a window have the same batch
            optimizer.step(model.gradients(*batch(index // 2)))
    wanted.append(loss_of(model, *batch(7)))
    for rank, (losses, arrays, told) in enumerate(rank_pools.get(2).run(on_rank)):
        np.testing.assert_allclose(losses, wanted, rtol=1e-12)
        assert told == ({"loss": losses[3]}, 20 if rank == 0 else 4)
        for name, array in model.arrays.items():
            np.testing.assert_allclose(arrays[name], array, rtol=0, atol=1e-13)


@pytest.mark.parametrize("strategy", ["data", "zero=1"])
def test_a_rank_without_data_joins(rank_pools: PartPools, strategy: str) -> None:
    def on_rank() -> dict[str, Array]:
        from unidist_second import SGD, distribute

        with set_variables({"UNIDIST_STRATEGY": strategy}):
            runtime = context.init()
            try:
                model = linear()
                _, optimizer = distribute(model, SGD(model.arrays, lr=0.1, momentum=0.9))
                rank = runtime.topology.rank
                for step in range(2 if rank else 4):
                    optimizer.step(model.gradients(*batch(step, rank, 2)))
                runtime.join()
                return dict(model.arrays)
            finally:
                context.shutdown()

    model, optimizer = alone(range(2))
    for step in (2, 3):
        optimizer.step({name: each / 2 for name, each in model.gradients(*batch(step, 0, 2)).items()})
    for found in rank_pools.get(2).run(on_rank):
        for name, array in model.arrays.items():
            np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-14)


def test_ranks_that_drift_apart_are_found(rank_pools: PartPools) -> None:
    def on_rank() -> None:
        from unidist_second import SGD, distribute

        with set_variables({"UNIDIST_VERIFY": "every=1"}):
            runtime = context.init()
            try:
                model = linear()
                _, optimizer = distribute(model, SGD(model.arrays, lr=0.1))
                optimizer.step(model.gradients(*batch(0)))
                model.arrays["bias"] += runtime.topology.rank
                with pytest.raises(MismatchError, match="after update 2, parameter 'bias' is not the same"):
                    optimizer.step(model.gradients(*batch(1)))
            finally:
                context.shutdown()

    rank_pools.get(2).run(on_rank)


SCRIPT = """
import os, signal
from unidist.elastic import run
from unidist.runtime import current, init
from unidist_second import SGD, ArrayState, distribute
from test_second_training import batch, linear

init()
model = linear(seed=current().topology.rank)
_, optimizer = distribute(model, SGD(model.arrays, lr=0.1, momentum=0.9))
state = ArrayState(model, optimizer, step=0, sizes=[])

@run
def train(state):
    state.sizes = [*state.sizes, current().topology.world_size]
    while state.step < 8:
        rank, size = current().topology.rank, current().topology.world_size
        if state.step == 5 and rank == 1 and len(state.sizes) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step(model.gradients(*batch(state.step, rank, size)))
        state.step += 1
        if state.step % 2 == 0:
            state.commit()

train(state)
print("sizes", state.sizes, flush=True)
print("found", {name: each.ravel().tolist() for name, each in model.arrays.items()}, flush=True)
"""


@pytest.mark.parametrize("strategy", ["data", "zero=1"])
def test_a_job_goes_on_without_a_rank_that_was_killed(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["-np", "3", "--min-np", "2", "--strategy", strategy]
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(folders)}
    with ElasticJob.start(tmp_path, options, ["train.py"], environment) as job:
        assert job.end(seconds=120) == 0, job.lines
    expected, _ = alone(range(8))
    found = job.said(r"found (.*)")
    assert len(found) >= 2, job.lines
    for (text,) in found:
        for name, numbers in ast.literal_eval(text).items():
            np.testing.assert_allclose(numbers, expected.arrays[name].ravel(), rtol=0, atol=1e-13)
