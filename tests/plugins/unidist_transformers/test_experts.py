"""Experts of models of transformers, divided over ranks, give the numbers of one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _transformers_experts import errors_of

KINDS = ("mixtral", "qwen2", "qwen3", "olmoe", "gpt_oss")


def test_numbers_are_those_of_one_process(rank_pool: RankPoolFactory) -> None:
    cases = [(kind, "expert=2", False) for kind in KINDS] + [("mixtral", "expert=2,zero=1,clip_norm=1e9", False)]
    for found in rank_pool(2, env={"OMP_NUM_THREADS": "1"}).run(errors_of, (cases,)):
        assert all(isinstance(error, float) and error < 1e-12 for error in found.values()), found


def test_the_balance_loss_is_that_of_all_tokens(rank_pool: RankPoolFactory) -> None:
    cases = [(kind, "expert=2", True) for kind in ("mixtral", "qwen3", "grouped")]  # computed in float32
    for found in rank_pool(2, env={"OMP_NUM_THREADS": "1"}).run(errors_of, (cases,)):
        assert all(isinstance(error, float) and error < 1e-5 for error in found.values()), found
