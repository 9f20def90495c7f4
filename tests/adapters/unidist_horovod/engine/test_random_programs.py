"""Random programs over the engine horovod give what numpy gives."""

from __future__ import annotations

import pytest
from random_programs import check_programs

from unidist.testing.fixtures import RankPoolFactory

pytestmark = [pytest.mark.parallel, pytest.mark.soak]


def test_many_programs(rank_pool: RankPoolFactory) -> None:
    check_programs(rank_pool, "horovod", sizes=(3,), examples=20)
