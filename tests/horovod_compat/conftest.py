"""Ranks that have Horovod and unidist, and what the tests of this folder check."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from mpi_pool import MpiPools

pytest.importorskip("horovod", reason="Horovod is not installed (`unidist build horovod`)")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks import the cases; they get this process's path

from beside import differences, outcomes

_LIMIT = timedelta(seconds=300)
_ONLY = os.environ.get("COMPAT_ONLY", "")
"""A part of the names of the cases to run, to work on those."""

Compare = Callable[[Any, str, str, str, dict[str, str]], None]


@pytest.fixture
def compare(tmp_path: Path) -> Iterator[Compare]:
    """Return `compare(ranks, module, part, engine, env)`, which fails where unidist does not do what a table says.

    `part` is the part of the library ("torch"). Over `mpi` unidist has ranks of its own, under mpirun with `env`; over
    the others it has those that Horovod has.
    """
    mpi = MpiPools(tmp_path)

    def check(ranks: Any, module: str, part: str, engine: str, env: dict[str, str]) -> None:
        table = importlib.import_module(module).TABLE
        theirs = ranks.run(outcomes, (module, f"horovod.{part}", engine, _ONLY), timeout=_LIMIT)
        ours_on = mpi.get(2, env=env) if engine == "mpi" else ranks
        ours = ours_on.run(outcomes, (module, f"unidist.{part}", engine, _ONLY), timeout=_LIMIT)
        assert [case.name for case in table.cases if _ONLY in case.name and case.name not in ours[0]] == []
        found = differences(table, theirs, ours)
        assert not found, "\n".join([f"{len(found)} differences", *found])

    yield check
    mpi.close()
