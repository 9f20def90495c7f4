"""Models of transformers train on divided sequences as they are, with the numbers of one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _transformers_context import errors_of

CASES = [
    ("llama", "context=2"),
    ("llama", "context=2:exchange=ulysses"),
    ("gpt2", "context=2"),
    ("bert", "context=2:exchange=gather"),
]


def test_numbers_are_those_of_one_process(rank_pool: RankPoolFactory) -> None:
    for found in rank_pool(2, env={"OMP_NUM_THREADS": "1"}).run(errors_of, (CASES,)):
        for case, errors in zip(CASES, found, strict=True):
            assert errors.pop("loss") < 1e-5, "which the library computes in float32"
            assert max(errors.values()) < 1e-12, f"{case}: {errors}"
