"""The check that replicas of parameters are equal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unidist.settings.environment import Verify
from unidist.topology import Topology
from unidist.verification.replicas import replica_check


@pytest.mark.parametrize("keeps_replicas", [True, False])
def test_only_replicas_that_a_strategy_keeps_equal_are_compared(keeps_replicas: bool) -> None:
    runtime: Any = SimpleNamespace(
        settings=SimpleNamespace(verify=Verify()), is_elastic=False, topology=Topology(0, 2, 0, 2)
    )
    strategy = SimpleNamespace(keeps_replicas=keeps_replicas, changes_model=False)
    plan: Any = SimpleNamespace(strategies=(strategy,), model_axes=())
    assert (replica_check(runtime, plan, lambda: ()) is not None) == keeps_replicas
