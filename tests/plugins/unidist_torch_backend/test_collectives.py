"""Every call of torch.distributed gives the same over `unidist` as over gloo, on the same ranks, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _collectives import compare

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("size", [2, 3])
def test_every_call_is_equal_to_gloo(torch_pools: PartPools, tmp_path: Path, size: int) -> None:
    pool = torch_pools.get(size)
    for differences in pool.run(compare, (str(tmp_path),), per_rank_args=[(rank, size) for rank in range(size)]):
        assert differences == {}
