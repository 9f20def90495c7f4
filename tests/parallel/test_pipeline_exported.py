"""Models that torch.fx cannot follow, over a pipeline: torch.export does, with the numbers of one process."""

from __future__ import annotations

import pytest
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory
from unidist_pipeline.strategy import Pipeline

pytest.importorskip("torch", reason="the training is in PyTorch")

import pipeline_exported

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


def test_models_that_fx_cannot_follow_are_exported(rank_pool: RankPoolFactory) -> None:
    example = pipeline_exported.batch(0)[0]
    strategy = Pipeline(2, schedule="zb-h1", microbatches=3, split="body.layers.1", example=example)
    (first, held), (second, other) = rank_pool(2).run(pipeline_exported.training, (strategy,))
    assert max(first, second) < 1e-12
    assert held & other == {"body.embed.weight", "head.weight"}, "one parameter, which both stages use"
    assert {"body.layers.0.norm.running_mean", "body.used"} <= held
    assert {"body.layers.1.norm.running_mean", "body.layers.1.wide.weight"} <= other


def test_what_cannot_be_exported_is_refused_and_says_why(rank_pool: RankPoolFactory) -> None:
    told = {
        "values": ("torch.fx: ", "torch.export, with the example: ", "not values"),
        "function": ("Rounding", "backward pass of its own"),
        "hooks": ("'second' has hooks",),
        "buffer": ("changes 'seen'", "stages 0 and 1"),
        "assigned": ("another tensor into 'seen'", "copy_"),
        "no example": ("ConfigurationError", "example=x", "torch.export"),
    }
    for found in rank_pool(2).run(pipeline_exported.refused):
        for name, words in told.items():
            for word in words:
                assert word in found.get(name, "nothing was raised"), f"{name}: {found.get(name)}"
