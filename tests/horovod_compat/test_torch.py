"""`unidist.torch` does what `horovod.torch` does, call by call, in one job."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch_cases
from beside import differences, outcomes
from part_pools import PartPools

pytestmark = [pytest.mark.parallel, pytest.mark.slow]
_LIMIT = timedelta(seconds=200)


@pytest.mark.parametrize("engine", ["shm", pytest.param("gloo", marks=pytest.mark.soak)])
def test_every_call_does_what_horovods_does(torch_pools: PartPools, engine: str) -> None:
    ranks = torch_pools.get(2)
    theirs = ranks.run(outcomes, ("torch_cases", "horovod.torch", engine), timeout=_LIMIT)
    ours = ranks.run(outcomes, ("torch_cases", "unidist.torch", engine), timeout=_LIMIT)
    assert not any(missing := [case.name for case in torch_cases.TABLE.cases if case.name not in ours[0]]), missing
    assert differences(torch_cases.TABLE, theirs, ours) == []
