"""A rank that closes its communicators before the others have finished."""

from __future__ import annotations

import secrets
from datetime import timedelta

import numpy as np
import pytest
from horovod_bindings import ENVIRONMENTS, skip_without

from unidist.buffer import Buffer
from unidist.testing._rank_side import EngineConnector
from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("binding", ["torch", "tensorflow"])
def test_what_others_do_without_a_rank_that_has_closed_is_completed(rank_pool: RankPoolFactory, binding: str) -> None:
    skip_without(binding)

    def case(connector: EngineConnector) -> None:
        world = connector.connect("leaving")
        part = world.split((1, 2) if world.rank else ())
        if part is not None:
            for _ in range(30):  # the first one waits 2 seconds for them
                values = np.full(1000, world.rank)
                part.allreduce(Buffer.of(values), Buffer.of(values)).wait()
                assert (values == 3).all()
            part.close()
        connector.close(world)

    connector = EngineConnector("horovod", secrets.token_hex(4), timedelta(seconds=60))
    rank_pool(3, env=ENVIRONMENTS[binding]).run(case, (connector,), timeout=timedelta(seconds=180))
