"""How a job of mpirun over the engine `mpi` ends: in order, or as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi_pool import command, variables

from unidist.jobs.processes import LocalProcesses

pytestmark = pytest.mark.parallel

_BEGIN = """
import os, sys, time
from datetime import timedelta
from unidist.runtime import context
from unidist.errors import PeerLostError, StalledError
"""
_INIT = "world = context.init().world; world.barrier().wait()\n"

Job = Callable[..., tuple[int, str, float]]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A function that runs a script on two ranks: returns mpirun's exit code, what was written, and the seconds."""

    def run(script: str, *, before: str = "") -> tuple[int, str, float]:
        path, output = tmp_path / "script.py", tmp_path / "output.txt"
        path.write_text(_BEGIN + before + _INIT + script)
        env = {**variables({"UNIDIST_ENGINE": "mpi"}), "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
        begin = time.monotonic()
        with output.open("wb") as file, LocalProcesses(1, env=env) as processes:
            mpirun = processes.start(
                command(2, str(path)), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
            code = mpirun.wait(100)
        return code, output.read_text(errors="replace"), time.monotonic() - begin

    return run


def test_a_script_ends_in_order(job: Job) -> None:
    code, text, _ = job("context.shutdown(); context.init().world.barrier().wait(); print('end of', world.rank)")
    assert code == 0, text
    assert "end of 0" in text
    assert "end of 1" in text


def test_an_exception_on_one_rank_ends_the_job(job: Job) -> None:
    code, text, seconds = job("if world.rank: raise ValueError('forty-two')\nworld.barrier().wait()")
    assert code == 1, text
    assert "ValueError: forty-two" in text
    assert seconds < 80  # a rank that waits does so for longer


def test_a_rank_that_exits_early_is_named_by_the_others(job: Job) -> None:
    code, text, seconds = job("if world.rank: sys.exit(3)\nworld.barrier().wait()")
    assert code != 0, text
    assert "barrier: rank 1 left" in text
    assert seconds < 80  # a rank that waits does so for longer


def test_a_job_that_has_caught_a_stall_ends_in_order(job: Job) -> None:
    code, text, _ = job(
        "other = world.split([0, 1])\n"
        "if world.rank:\n"
        "    try: other.recv(__import__('unidist.buffer').buffer.Buffer.of(bytearray(1)), source=0).wait()\n"
        "    except PeerLostError as exc: print('told:', exc)\n"
        "else:\n"
        "    try: other.barrier().wait(timedelta(seconds=0.3))\n"
        "    except StalledError as exc: print('caught:', exc.ranks)\n"
        "world.barrier().wait()\n"
    )
    assert code == 0, text
    assert "caught: (1,)" in text
    assert "told: recv of 1 bytes from rank 0 on rank 1" in text


def test_a_job_that_hangs_after_a_stall_is_ended(job: Job) -> None:
    code, text, seconds = job(
        "from unidist_mpi import process; process.END_SEC = 1.0\n"
        "if world.rank: time.sleep(300)\n"
        "try: world.barrier().wait(timedelta(seconds=0.3))\n"
        "except StalledError: sys.exit(0)\n"
    )
    assert code == 1, text
    assert "rank 0 has ended after a failed operation" in text
    assert seconds < 80  # a rank that waits does so for longer


def test_a_forked_child_ends_without_mpi(job: Job) -> None:
    code, text, _ = job(
        "child = os.fork()\nif not child: sys.exit(0)\nprint('child', os.waitpid(child, 0)[1]); world.barrier().wait()"
    )
    assert code == 0, text
    assert text.count("child 0") == 2


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("import mpi4py; mpi4py.rc.thread_level = 'funneled'", "needs MPI.THREAD_MULTIPLE"),
        ("from mpi4py import MPI; MPI.Finalize()", "starts only once"),
        ("os.environ['UNIDIST_RANK'] = '0'; os.environ['UNIDIST_WORLD_SIZE'] = '1'", "mpirun started 2 processes"),
    ],
)
def test_an_mpi_that_cannot_be_used_is_told(job: Job, before: str, message: str) -> None:
    code, text, _ = job("", before=before + "\n")
    assert code == 1, text
    assert "ConfigurationError" in text
    assert message in text


def test_an_mpi_that_the_script_starts_itself_is_used(job: Job) -> None:
    code, text, _ = job(
        "from mpi4py import MPI; print('sum', MPI.COMM_WORLD.allreduce(1))",
        before="from mpi4py import MPI; MPI.COMM_WORLD.Barrier()\n",
    )
    assert code == 0, text
    assert text.count("sum 2") == 2


def test_shm_works_under_mpirun_too(job: Job) -> None:
    code, text, _ = job("print('over', world.description)", before="os.environ['UNIDIST_ENGINE'] = 'auto'\n")
    assert code == 0, text
    assert text.count("over shm, ranks 0, 1") == 2
