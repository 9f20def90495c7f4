"""The second sample plugin: a framework under strategies of ours, and a strategy under a framework of ours."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

from unidist.errors import ConfigurationError, PluginError
from unidist.runtime import context
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import set_variables
from unidist.strategy import BindingSpec
from unidist.testing import FrameworkConformance, StrategyConformance, Training
from unidist.testing.fixtures import RankPoolFactory

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


def test_what_it_registers_is_known_as_its_own(manager: PluginManager) -> None:
    assert manager.plugins["second"].problems == []
    origin = "'second' (unidist-second-plugin)"
    assert manager.frameworks.origin_of("numpy") == origin
    assert manager.strategies.origin_of("small-zero") == origin
    for name in ("zero/numpy", "small-zero/torch"):
        assert manager.registry(BindingSpec).origin_of(name) == origin


def test_all_that_it_imports_is_public(manager: PluginManager) -> None:
    command = [sys.executable, "-m", "unidist_launch", "plugins", "--check", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    (found,) = [each for each in json.loads(done.stdout)["plugins"] if each["name"] == "second"]
    assert (found["problems"], found["notes"]) == ([], [])


class TestNumpy(FrameworkConformance):
    framework = "numpy"

    def gaps(self) -> Array:
        return np.zeros((4, 6))[:, ::2]


class _UnderNumpy(StrategyConformance):
    framework = "numpy"
    optimizers = ("sgd",)
    sizes = (1, 2, 3)


@pytest.mark.parallel
class TestDataOnNumpy(_UnderNumpy):
    strategy = "data"


@pytest.mark.parallel
class TestAccumulateOnNumpy(_UnderNumpy):
    strategy = "accumulate=2"
    passes = 2


@pytest.mark.parallel
class TestZeroOnNumpy(_UnderNumpy):
    strategy = "zero=1"


@pytest.mark.parallel
class TestZero2WithAccumulateOnNumpy(_UnderNumpy):
    strategy = "zero=2,accumulate=2"
    passes = 2
    sizes = (1, 3)


@pytest.mark.parallel
class TestSmallZeroOnTorch(StrategyConformance):
    strategy = "small-zero"


@pytest.mark.parallel
class TestSmallZeroWithAccumulateOnTorch(StrategyConformance):
    strategy = "small-zero,accumulate=2"
    passes = 2
    sizes = (2,)
    optimizers = ("adamw",)


TRAINING = Training("sgd", steps=12, passes=2)
LIMIT = 1.0


def in_float64(gradients: Mapping[str, Array]) -> dict[str, Array]:
    """Leave the float32 branch out: its rounding would be in the norm, and so in everything."""
    return {name: gradient for name, gradient in gradients.items() if gradient.dtype == np.float64}


def clipped(strategy: str, training: Training) -> tuple[dict[str, Array], int]:
    """Train on a rank; return the parameters, and how many values its optimizer keeps."""
    from unidist_second import SGD, conformance, distribute
    from unidist_second.framework import NumpyFramework

    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        runtime = context.init()
        try:
            model = conformance.model()
            optimizer = SGD(NumpyFramework().parameters(model), lr=0.5, momentum=0.9)
            distribute(model, optimizer)
            features, labels = training.data(6, 3)
            for share in training.shares(runtime.topology.rank, runtime.topology.world_size):
                optimizer.step(in_float64(model.gradients(3 * features[share], labels[share])))
        finally:
            context.shutdown()
    assert optimizer.binding is not None
    kept = optimizer.binding.inner.velocities(make=False)
    return dict(model.arrays), sum(velocity.size for _, _, velocity in kept)


def clipped_by_hand(training: Training) -> tuple[dict[str, Array], int]:
    """Return what one process comes to, without unidist, and in how many steps there was something to clip."""
    from unidist_second import SGD, conformance
    from unidist_second.framework import NumpyFramework

    model = conformance.model()
    optimizer = SGD(NumpyFramework().parameters(model), lr=0.5, momentum=0.9)
    features, labels = training.data(6, 3)
    num_clipped = 0
    for share in training.shares(0, 1):
        gradients = in_float64(model.gradients(3 * features[share], labels[share]))
        norm = float(np.sqrt(sum(float((each**2).sum()) for each in gradients.values())))
        num_clipped += norm > LIMIT
        factor = min(1.0, LIMIT / (norm + 1e-6))  # as PyTorch does it
        optimizer.step({name: each * factor for name, each in gradients.items()})
    return model.arrays, num_clipped


@pytest.mark.parallel
@pytest.mark.parametrize("size", [1, 2, 3])
def test_everything_at_once_is_one_process_that_clips(rank_pool: RankPoolFactory, size: int) -> None:
    expected, num_clipped = clipped_by_hand(TRAINING.concatenated())
    assert num_clipped > 2
    for line in ("data,accumulate=2,clip_norm=1", "zero=1,accumulate=2,clip_norm=1"):
        outcomes = rank_pool(size).run(clipped, (line, TRAINING))
        for found, _ in outcomes:
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=f"{name} under {line}")
        trained = sum(expected[name].size for name in ("inner", "head", "bias"))
        kept = [count for _, count in outcomes]
        assert sum(kept) == (trained if "zero" in line else size * trained), f"{line} keeps {kept} of {trained}"


def test_what_does_not_work_together_is_said(manager: PluginManager) -> None:
    from unidist_second.framework import NumpyFramework

    with pytest.raises(ConfigurationError, match=r"'small-zero' has no binding for the framework 'numpy'; .*torch"):
        manager.binding("small-zero", NumpyFramework())


def train_at_stage_3() -> str:
    from unidist_second import SGD, conformance, distribute

    with set_variables({"UNIDIST_STRATEGY": "zero=3", "UNIDIST_ENGINE": "single"}):
        context.init()
        try:
            model = conformance.model()
            distribute(model, SGD(model.arrays, lr=1))
        except (ConfigurationError, PluginError) as exc:
            return str(exc)
        finally:
            context.shutdown()
    return ""


@pytest.mark.parallel
def test_stage_3_is_refused(rank_pool: RankPoolFactory) -> None:
    (message,) = rank_pool(1).run(train_at_stage_3)
    assert "zero=3 does not work with numpy" in message


def state_on_a_rank() -> tuple[int, int, list[float]]:
    """Train with AdamW; return how many states a rank keeps, how many `state_dict` has, and where it goes on to."""
    import torch

    import unidist.torch as ud

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        return ud.distribute(model := torch.nn.Linear(4, 3), torch.optim.AdamW(model.parameters()), "small-zero")

    def train(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()

    ud.init()
    try:
        model, optimizer = made()
        train(model, optimizer)
        state, weights = (
            copy.deepcopy(optimizer.state_dict()),
            {name: value.clone() for name, value in model.state_dict().items()},
        )
        kept = len(optimizer.state)
        train(model, optimizer)
        wanted = torch.cat([value.flatten() for value in model.parameters()])
        again, loaded = made()
        again.load_state_dict(weights)
        loaded.load_state_dict(state)
        train(again, loaded)
        found = torch.cat([value.flatten() for value in again.parameters()])
        return kept, len(state["state"]), (found - wanted).abs().max().reshape(1).tolist()
    finally:
        ud.shutdown()


@pytest.mark.parallel
def test_a_state_of_shards_can_be_saved_and_loaded(rank_pool: RankPoolFactory) -> None:
    assert rank_pool(2).run(state_on_a_rank) == [(1, 2, [0.0])] * 2
