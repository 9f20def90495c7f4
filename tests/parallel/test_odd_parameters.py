"""Unusual parameters, groups, modules and `torch.func`: as in one process, or an error that says what to do."""

from __future__ import annotations

import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("torch", reason="the trainings are in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _odd_parameters import CASES, outcomes

pytestmark = pytest.mark.parallel

TRANSFORMED = "torch.func transforms"
OPERATIONS = ("grad through SyncBatchNorm", "grad through an operation")
MODELS = tuple(name for name in CASES if name.startswith(("grad", "jacrev", "jvp", "vmap")) and name not in OPERATIONS)
CALLS = ("functional_call", "functional_call with other values")
NOT_CUT = dict.fromkeys(("zero-sized", "zero-sized, Adam", "complex", "complex, Adam"), "no layer of .* can be cut")
ALONE = dict.fromkeys((*MODELS, *CALLS), "none of which can run it alone")
AWAY = dict.fromkeys(("grad", "grad per sample", CALLS[1]), "unidist_zero.gathered")

REFUSED: dict[str, dict[str, str]] = {
    "data": {},
    "zero=1": {},
    "zero=2": {},
    "zero=3": {},
    "zero=3:shared=false": {**AWAY, "new layer added": "add only parameters of this model"},
    "tensor=2": {**dict.fromkeys(MODELS, TRANSFORMED), **NOT_CUT},
    "pipeline=2": {**ALONE, "new layer added": "would be in no stage"},
    "accumulate=2": {},
    "accumulate=2,zero=2": {},
    "precision=bf16": {},
}
"""Text of the error, by strategy and case."""


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


@pytest.mark.parametrize("strategy", REFUSED)
def test_training_is_as_in_one_process_or_refused(rank_pools: PartPools, strategy: str) -> None:
    refused = {**dict.fromkeys(OPERATIONS, TRANSFORMED), **REFUSED[strategy]}
    tolerance = 0.02 if "precision" in strategy else 1e-12
    for found in rank_pools.get(2, engine="shm").run(outcomes, (strategy,), timeout=timedelta(seconds=120)):
        for name in CASES:
            if name in refused:
                assert re.search(refused[name], str(found[name])), f"{name}: {found[name]}"
            else:
                assert not isinstance(found[name], str), f"{name}: {found[name]}"
                assert found[name] < tolerance, name
