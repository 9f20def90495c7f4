"""`--verify` finds what a strategy would train wrongly without a word: each mend is taken out, and it must notice."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the programs are in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _verify import trains

pytestmark = pytest.mark.parallel
LIMIT = timedelta(seconds=120)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("arguments", "the output has the shape"),
        ("arguments of elastic steps", "the output has the shape"),
        ("clipping", "is not the same on ranks 0, 1"),
        ("mixing", "the output["),
        ("branching", "the output of another pass["),
        ("output class", "the output is a immutable_dict and not a Answers"),
        ("compressor", "after update 1, parameter 'weight' is not the same"),
        ("plateau", "would update with different learning rates (rank 0: 0.1; rank 1: 0.01"),
        ("checkpoint", "at the checkpoint, parameter 'bias' is not the same"),
    ],
)
def test_without_the_mend_every_rank_raises(rank_pool: RankPoolFactory, case: str, said: str) -> None:
    found = rank_pool(2).run(trains, (case,), {"mended": False, "verify": "first"}, timeout=LIMIT)
    for kind, text in found:
        assert kind == "MismatchError", text
        assert said in text
        assert "--verify off" in text
    silent = rank_pool(2).run(trains, (case,), {"mended": False, "verify": "off"}, timeout=LIMIT)
    assert {kind for kind, _ in silent} == {""}, "the case shows nothing: it does not train in silence"


@pytest.mark.parametrize(
    "case",
    [
        "arguments",
        "arguments of elastic steps",
        "clipping",
        "output class",
        "counting forward",
        "changed modes",
        "hooks",
        "tokens in a dataclass",
        "tokens in an object",
    ],
)
def test_what_is_right_is_trained(rank_pool: RankPoolFactory, case: str) -> None:
    found = rank_pool(2).run(trains, (case,), {"mended": True, "verify": "every=1"}, timeout=LIMIT)
    assert found == [("", ""), ("", "")]
