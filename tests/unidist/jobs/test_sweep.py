"""Finding and killing the processes of a job, by session and by environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from unidist.jobs import sweep as process_sweep

JOB = "sweep-test-job"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_finds_a_session_by_leader_and_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    start = process_sweep.start_time(sleeper.pid)
    assert process_sweep.find_processes(JOB, {sleeper.pid: start}) == [sleeper.pid]


def test_passes_over_a_process_that_only_took_the_leaders_number(sleeper: subprocess.Popen[bytes]) -> None:
    start = process_sweep.start_time(sleeper.pid)
    assert process_sweep.find_processes(JOB, {sleeper.pid: start - 1}) == []


def test_finds_by_environment_and_not_by_a_longer_name() -> None:
    env = {**os.environ, "UNIDIST_JOB_ID": JOB}
    with subprocess.Popen(["sleep", "60"], env=env) as process:
        try:
            assert process_sweep.find_processes(JOB[:-1], {}) == []
            assert process_sweep.find_processes(JOB, {}) == [process.pid]
            assert process_sweep.kill_processes(JOB, {})
            assert process.wait(60) == -9
        finally:
            process.kill()


def test_start_time_of_a_process_that_is_gone_is_an_error() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    with pytest.raises(ProcessLookupError):
        process_sweep.start_time(process.pid)


def test_watchdog_program_imports_nothing_heavy() -> None:
    code = f"import sys; exec(open({process_sweep.__file__!r}).read(), {{'__name__': 'sweep'}}); print(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert not {"unidist", "typing", "re", "socket", "subprocess", "ctypes"} & set(out.stdout.split())
