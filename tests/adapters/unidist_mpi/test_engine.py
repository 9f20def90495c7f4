"""What the engine `mpi` says of a job before MPI is started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from unidist.runtime.plugin_manager import PluginManager
from unidist.topology import Topology
from unidist_mpi.engine import MpiEngine


@pytest.fixture(autouse=True)
def _no_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PMIX_RANK", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_processes_that_mpirun_did_not_start_are_told_how() -> None:
    verdict = MpiEngine().supports(Topology(rank=1, world_size=4, local_rank=1, local_size=4))
    assert not verdict.usable
    assert "mpirun -n 4 python train.py" in verdict.reason


def test_a_job_of_another_size_than_mpiruns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    verdict = MpiEngine().supports(Topology(rank=0, world_size=2, local_rank=0, local_size=2))
    assert not verdict.usable
    assert "mpirun started 1 processes, but this job has 2" in verdict.reason


def test_the_processes_of_an_mpirun_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert MpiEngine().supports(Topology(rank=0, world_size=2, local_rank=0, local_size=2)).usable


def test_one_process_needs_no_mpirun() -> None:
    assert MpiEngine().supports(Topology()).usable


def test_it_is_never_taken_unasked() -> None:
    spec = PluginManager().load().engines.get("mpi")
    assert spec.priority < 0


def test_asking_whether_it_can_be_used_does_not_start_mpi() -> None:
    code = (
        "import sys; from unidist.runtime.plugin_manager import PluginManager\n"
        "engine = PluginManager().load().engines.get('mpi').load()\n"
        "print(engine.availability().reason); assert 'mpi4py.MPI' not in sys.modules"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "mpi4py" in found.stdout
