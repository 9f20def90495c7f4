"""`horovod.run`: a function on all ranks of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unidist.errors import ConfigurationError, RemoteError
from unidist_launch.horovod import run

pytestmark = pytest.mark.parallel


def place(factor: int, *, fails_on: int = -1) -> tuple[int, int, str]:
    import horovod.common.exceptions as exceptions  # type: ignore[import-untyped, unused-ignore]

    from unidist.runtime import context

    topology = context.init().topology
    if topology.rank == fails_on:
        raise KeyError("on purpose")
    return factor * topology.rank, topology.world_size, exceptions.HorovodInternalError.__module__


def test_results_come_in_rank_order_and_horovod_is_unidist_there(capfd: pytest.CaptureFixture[str]) -> None:
    found = run(place, (10,), num_proc=2, hosts="localhost:2", use_mpi=True, ssh_port=22, disable_cache=True)
    assert found == [(0, 2, "unidist.errors"), (10, 2, "unidist.errors")]
    shown = capfd.readouterr().err
    assert "--mpi of horovodrun has no effect" in shown
    assert "--ssh-port: not used" in shown


def test_an_exception_comes_with_its_rank(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RemoteError, match="rank 1 raised KeyError: 'on purpose'") as caught:
        run(place, (1,), {"fails_on": 1}, 2)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "rank 1 failed first" in capfd.readouterr().err


def test_an_elastic_job_returns_as_many_results_as_it_needs_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    found = run(
        place, (1,), num_proc=2, min_num_proc=1, max_num_proc=2, host_discovery_script=str(script), reset_limit=3,
        output_filename="kept",
    )  # fmt: skip
    assert found == [(0, 2, "unidist.errors")]
    assert list(tmp_path.glob(".unidist-run-*")) == []
    assert (tmp_path / "kept").is_dir()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"hosts": "localhost:2", "hostfile": "x"}, ValueError, "hosts or hostfile"),
        ({"use_gloo": True, "use_mpi": True}, ValueError, "use_gloo or use_mpi"),
        ({"num_proc": 4, "hosts": "localhost:2"}, ConfigurationError, "-np 4 needs 4 slots"),
        ({"output_filename": "/dev/null/x"}, ConfigurationError, "/dev/null/x"),
    ],
)
def test_what_cannot_be_carried_out_is_an_error(
    arguments: dict[str, Any], error: type[Exception], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=message):
        run(place, (1,), **arguments)


def test_deprecated_names_are_taken_with_a_warning() -> None:
    def two() -> int:
        return 2

    with pytest.warns(DeprecationWarning, match="np is deprecated, as in Horovod; use num_proc"):
        assert run(two, np=2) == [2, 2]


def test_a_rank_that_ends_without_a_result_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RemoteError, match="exit code 7"):
        run(sys.exit, (7,))
    with pytest.raises(RemoteError, match="without a result of rank 0"):
        run(sys.exit, (0,))


def test_the_job_ends_with_the_process_that_called(tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(
        "import os, time\n"
        "from unidist_launch.horovod import run\n"
        "def wait():\n"
        f"    open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "run(wait, num_proc=2)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, tmp_path / "caller.py"], env=environment, stderr=subprocess.DEVNULL)

    def poll(condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + 60
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    files = [tmp_path / "0", tmp_path / "1"]
    try:
        assert poll(lambda: all(file.exists() and file.read_text() for file in files))
        pids = [int(file.read_text()) for file in files]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert poll(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
