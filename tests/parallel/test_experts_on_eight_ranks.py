"""Expert parallelism in PyTorch on eight ranks, alone and in triples of strategies."""

from __future__ import annotations

import itertools
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from composition_lines import check as check_lines

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_experts import LAYERS, Case, composed_errors, errors_of

pytestmark = [pytest.mark.parallel, pytest.mark.soak]

TIMEOUT = timedelta(minutes=30)
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
OTHERS = ("context=2", "tensor=2", "pipeline=2:microbatches=2", "zero=1", "zero=2", "activations=recompute")
CASES = [
    *(Case(layer, strategy=f"expert={size}") for layer in LAYERS for size in (2, 4, 8)),
    Case("plain", strategy="expert=2,tensor=2,zero=1,clip_norm=0.3"),
    Case("plain", strategy="expert=2,pipeline=2:microbatches=2,zero=1,clip_norm=0.3", step=True),
    Case("plain", strategy="expert=2,tensor=2,pipeline=2:microbatches=2", step=True),
]


def test_numbers_are_those_of_one_process(rank_pool: RankPoolFactory) -> None:
    for found in rank_pool(8, env=ENVIRONMENT).run(errors_of, (CASES,), timeout=TIMEOUT):
        assert all(error == 0.0 for error in found.values()), found


def test_transformers_with_experts_in_triples(rank_pool: RankPoolFactory) -> None:
    pairs = [pair for pair in itertools.combinations(OTHERS, 2) if not pair[0].startswith("zero")]
    lines = [f"expert=2,{one},{two}" for one, two in pairs]
    check_lines(rank_pool(8, env=ENVIRONMENT).run(composed_errors, (lines,), timeout=TIMEOUT))
