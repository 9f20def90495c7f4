"""Expert parallelism in Keras gives the numbers of one process, alone and with other strategies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("tensorflow", reason="the training is in Keras on TensorFlow")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _keras_experts import Case, errors_of, refusals, with_mean_over_holders

pytestmark = pytest.mark.parallel

TIMEOUT = timedelta(minutes=6)  # graphs are traced for each case
CASES = {
    2: [
        Case("switch"),
        Case("after", "expert=2,clip_norm=0.3"),
        Case("losses", "expert=2,accumulate=2", passes=2),
        Case("one", loop=True, uneven=True),
        Case("losses", "data"),
        Case("limited", "zero=1"),
    ],
    4: [
        Case("losses", "expert=4"),
        Case("limited", "expert=2", loop=True, uneven=True),
        Case("plain", "expert=2,tensor=2"),
        Case("losses", "expert=2,zero=2,clip_norm=0.3"),
    ],
}


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


def check(found: Sequence[dict[str, float | str]]) -> None:
    wrong = {
        case: [each[case] for each in found]
        for case in found[0]
        if not all(isinstance(each[case], float) and float(each[case]) < 1e-12 for each in found)
    }
    assert not wrong, "\n".join(f"{case}: {outcomes}"[:2000] for case, outcomes in wrong.items())


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_numbers_are_those_of_one_process(tensorflow_pools: PartPools, ranks: int) -> None:
    check(tensorflow_pools.get(ranks).run(errors_of, (CASES[ranks],), timeout=TIMEOUT))


def test_a_wrong_group_is_seen(tensorflow_pools: PartPools) -> None:
    errors = tensorflow_pools.get(2).run(with_mean_over_holders, timeout=TIMEOUT)
    assert all(isinstance(error, float) and error > 1e-6 for error in errors), errors


@pytest.mark.soak
def test_checkpoints_load_at_other_numbers_of_ranks(tensorflow_pools: PartPools, tmp_path: Path) -> None:
    folders = [str(tmp_path / str(number)) for number in range(2)]
    legs = [
        (4, Case("losses", "expert=2,zero=1", steps=1, saves=folders[0])),
        (2, Case("losses", "expert=2", steps=1, first=1, loads=folders[0], saves=folders[1])),
        (1, Case("losses", "data", steps=1, first=2, loads=folders[1])),
    ]
    for ranks, case in legs:
        check(tensorflow_pools.get(ranks).run(errors_of, ([case],), timeout=TIMEOUT))


def test_what_cannot_be_divided_is_refused(tensorflow_pools: PartPools) -> None:
    for found in tensorflow_pools.get(2).run(refusals):
        assert "no experts found in Sequential" in found["nothing"]
        assert "do not divide over 2 ranks; choices: expert=1, expert=7" in found["odd"]
        assert "zero=1 or zero=2 with expert" in found["zero"]
