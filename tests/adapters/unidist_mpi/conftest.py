"""The tests of the MPI adapter run under a real mpirun."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mpi_pool import MpiPool, MpiPools


@pytest.fixture(scope="module")
def mpi_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MpiPools]:
    """All pools of a module; they end with it."""
    pools = MpiPools(tmp_path_factory.mktemp("mpi"))
    yield pools
    pools.close()


@pytest.fixture
def mpi_pool(mpi_pools: MpiPools) -> Callable[..., MpiPool]:
    """A function that returns a pool of ranks under mpirun."""
    return mpi_pools.get


@pytest.fixture(autouse=True)
def _needs_mpi() -> None:
    """Skip, with how to get it, where there is no MPI."""
    path = str(Path(sys.executable).parent)
    if importlib.util.find_spec("mpi4py") is None or not (shutil.which("mpirun") or shutil.which("mpirun", path=path)):
        pytest.skip("needs mpi4py and mpirun: pip install 'unidist-train[mpi]'")
