"""What a script sees of parameters in a store: state, errors, ranks that do not wait."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1]))  # the ranks get this path too

from _store_torch_scripts import SCRIPTS

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(torch_pools: PartPools, name: str) -> None:
    assert torch_pools.get(2).run(SCRIPTS[name]) == [None, None]
