"""Arguments that are no tensors decide what a model does, over a pipeline too; results are of the model's classes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_pipeline_arguments import a_number_by_default, refused, training

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


@pytest.mark.parametrize("exported", [False, True], ids=["fx", "export"])
def test_arguments_decide_and_results_keep_their_classes_as_in_one_process(
    rank_pool: RankPoolFactory, exported: bool
) -> None:
    for errors in rank_pool(2).run(training, (exported,)):
        assert len(errors) > 15
        assert not {name: error for name, error in errors.items() if error > 1e-10}


def test_a_number_that_is_left_out_is_that_number(rank_pool: RankPoolFactory) -> None:
    for difference, kind in rank_pool(2).run(a_number_by_default):
        assert difference < 1e-12
        assert kind == "CausalOutput"


def test_an_argument_that_might_change_unnoticed_is_refused(rank_pool: RankPoolFactory) -> None:
    for told in rank_pool(2).run(refused):
        for word in ("Opaque", "argument", "dataclasses"):
            assert word in told["fx"]
            assert word in told["export"]
