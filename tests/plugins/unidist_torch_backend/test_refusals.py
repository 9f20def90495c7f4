"""Wrong calls are one line that says what was asked; and what works beyond gloo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _refusals import all_calls, float8_moves, operations_beyond_gloo, overlap, refused

pytestmark = pytest.mark.parallel


def test_wrong_calls_are_one_line_on_every_rank_and_leave_the_group_usable(
    torch_pools: PartPools, tmp_path: Path
) -> None:
    pool, ranks = torch_pools.get(2), [(0, 2), (1, 2)]
    (tmp_path / "names").mkdir()
    names = pool.run(all_calls, (str(tmp_path / "names"),), per_rank_args=ranks)[0]
    for found in pool.run(refused, (str(tmp_path),), per_rank_args=ranks):
        assert list(found) == names, "some were not refused"
        for name, (kind, text) in found.items():
            assert kind == "UsageError", (name, text)
            assert "\n" not in text
        for name in ("all_reduce elsewhere", "send elsewhere", "all_gather elsewhere"):
            assert "it moves CPU tensors, and this one is on meta" in found[name][1]


def test_dtypes_without_arithmetic_are_moved(torch_pools: PartPools, tmp_path: Path) -> None:
    assert torch_pools.get(2).run(float8_moves, (str(tmp_path),), per_rank_args=[(0, 2), (1, 2)]) == [True, True]


def test_means_factors_uneven_sizes_and_logic(torch_pools: PartPools, tmp_path: Path) -> None:
    found = torch_pools.get(2).run(operations_beyond_gloo, (str(tmp_path),), per_rank_args=[(0, 2), (1, 2)])
    for rank, (mean, whole, weighted, logic, either, uneven, own, product) in enumerate(found):
        assert mean == [1.5, 4.0]
        assert whole == [1, 4]
        assert weighted == [3.0, 6.0]
        assert logic == [False, True, False]
        assert either == [True, True, False]
        assert uneven == [0.0, 1.0, 1.0]
        assert own == [2.0 * rank] * (rank + 1)
        assert product == [2j]


def test_operations_go_on_while_the_script_computes(torch_pools: PartPools, tmp_path: Path) -> None:
    for has_returned, ended in torch_pools.get(2).run(overlap, (str(tmp_path),), per_rank_args=[(0, 2), (1, 2)]):
        assert has_returned
        assert ended
