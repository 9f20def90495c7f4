"""Random programs over the engine mpi give what numpy gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mpi_pool import MpiPool
from random_programs import check_programs

pytestmark = [pytest.mark.parallel, pytest.mark.soak]


def test_many_programs(mpi_pool: Callable[..., MpiPool]) -> None:
    check_programs(mpi_pool, "mpi", sizes=(2, 3), examples=60)
