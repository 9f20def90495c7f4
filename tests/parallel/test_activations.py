"""Over ranks, a model whose blocks run again in the backward pass gives the numbers of one that keeps everything."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel

MODELS = "tests.plugins.unidist_activations"
LIMIT = 1e-12


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


def on_ranks(rank_pool: RankPoolFactory, framework: str, function: str, *arguments: Any, **options: Any) -> list[Any]:
    """Run a function of the framework's `_models` module on two ranks; it is imported there alone."""
    if importlib.util.find_spec({"keras": "tensorflow"}.get(framework, framework)) is None:
        pytest.skip(f"{framework} is not installed")
    return rank_pool(2).run(_on_rank, (f"{MODELS}._{framework}_models", function, *arguments), options)


def _on_rank(module: str, function: str, *arguments: Any, **options: Any) -> Any:
    return getattr(importlib.import_module(module), function)(*arguments, **options)


def difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max(float(np.max(np.abs(found[name] - value))) for name, value in expected.items())


@pytest.mark.parametrize(
    ("framework", "modes", "strategy", "passes"),
    [
        ("torch", [], "activations=recompute", 1),
        ("torch", [], "accumulate=2,activations=offload:path={folder}", 2),
        ("torch", [], "zero=2,activations=recompute", 1),
        ("keras", ["fit"], "activations=recompute,accumulate=2", 2),
    ],
)
def test_two_ranks_give_the_numbers_of_one_process(
    rank_pool: RankPoolFactory, tmp_path: Path, framework: str, modes: list[str], strategy: str, passes: int
) -> None:
    run = partial(on_ranks, rank_pool, framework)
    found = run("train_on_rank", strategy.format(folder=tmp_path), *modes, passes=passes, exact=True)
    plain = partial(run, "train", None, *(["eager"] if modes else []), passes=1, exact=True)
    assert difference(found[0], plain()[0]) <= LIMIT
    assert difference(found[1], found[0]) == 0
    assert difference(plain(rank=0, size=2)[0], found[0]) > 1e-6, "a missing exchange would not be seen"


@pytest.mark.parametrize(
    ("framework", "modes", "strategy", "passes"),
    [
        ("torch", [], "activations=recompute,accumulate=2", 2),
        ("keras", ["function"], "activations=recompute", 1),
    ],
)
def test_dropout_and_batch_norms_of_each_rank_are_those_without_the_strategy(
    rank_pool: RankPoolFactory, framework: str, modes: list[str], strategy: str, passes: int
) -> None:
    run = partial(on_ranks, rank_pool, framework, "train_on_rank")
    without = ",".join(item for item in strategy.split(",") if not item.startswith("activations")) or "data"
    options = {"passes": passes, "exact": False}
    for found, expected in zip(run(strategy, *modes, **options), run(without, *modes, **options), strict=True):
        assert difference(found, expected) <= LIMIT
