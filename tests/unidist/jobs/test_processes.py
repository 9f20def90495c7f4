"""Starting ranks on this host, with their environment, and leaving none behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from unidist.errors import ConfigurationError
from unidist.jobs.processes import LocalProcesses, describe_exit, watch_exit

PRINT_ENVIRONMENT = (sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))")


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def alive(mark: str) -> list[psutil.Process]:
    """Every living process with TEST_MARK=mark in its environment, this one apart."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


def environments(num_proc: int, env: dict[str, str] | None = None) -> list[dict[str, str]]:
    with LocalProcesses(num_proc, env=env) as job:
        started = [job.start(PRINT_ENVIRONMENT, stdout=subprocess.PIPE) for _ in range(num_proc)]
        return [json.loads(process.communicate(timeout=120)[0]) for process in started]


def test_each_rank_knows_its_place_under_every_name() -> None:
    for rank, env in enumerate(environments(2)):
        assert (env["UNIDIST_RANK"], env["UNIDIST_WORLD_SIZE"]) == (str(rank), "2")
        assert (env["UNIDIST_LOCAL_RANK"], env["UNIDIST_LOCAL_WORLD_SIZE"]) == (str(rank), "2")
        assert (env["UNIDIST_NODE_RANK"], env["UNIDIST_NUM_NODES"]) == ("0", "1")
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (
            str(rank),
            "2",
            str(rank),
            "2",
        )
        assert (env["HOROVOD_RANK"], env["HOROVOD_SIZE"]) == (str(rank), "2")
        assert env["HOROVOD_HOSTNAME"] == socket.gethostname()
        assert (env["HOROVOD_LOCAL_RANK"], env["HOROVOD_LOCAL_SIZE"]) == (str(rank), "2")
        assert (env["HOROVOD_CROSS_RANK"], env["HOROVOD_CROSS_SIZE"]) == ("0", "1")
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["UNIDIST_LAUNCHER_PID"] == str(os.getpid())


def test_two_jobs_differ_in_id_and_port_and_the_ranks_of_one_agree() -> None:
    (first, second), (other,) = environments(2), environments(1)
    assert first["UNIDIST_JOB_ID"] == second["UNIDIST_JOB_ID"] != other["UNIDIST_JOB_ID"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"] != other["MASTER_PORT"]


def test_users_variables_win_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMBIENT", "kept")
    env = environments(1, {"MASTER_PORT": "29501", "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "3", "MORE": "x=y"})[
        0
    ]
    assert (env["MASTER_PORT"], env["MASTER_ADDR"], env["OMP_NUM_THREADS"]) == ("29501", "localhost", "3")
    assert (env["MORE"], env["AMBIENT"]) == ("x=y", "kept")


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"])
def test_threads_share_the_cores_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name, raising=False)
    cores = len(os.sched_getaffinity(0))
    assert environments(1)[0][name] == str(cores)
    assert environments(cores + 1)[0][name] == "1"
    monkeypatch.setenv(name, "5")
    assert environments(1)[0][name] == "5"


def test_variables_of_an_outer_torchrun_job_do_not_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environments(1)[0]


@pytest.mark.parametrize("name", ["UNIDIST_RANK", "RANK", "HOROVOD_SIZE", "UNIDIST_JOB_ID", "UNIDIST_SECRET_FD"])
def test_variables_that_only_the_launcher_knows_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        LocalProcesses(2, env={name: "0"})


def test_less_than_one_process_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_proc=0"):
        LocalProcesses(0)


def test_ranks_share_a_sealed_secret_that_no_list_of_processes_shows() -> None:
    code = """
        import json, os, pathlib
        from unidist.settings.placement import read_placement
        secret = read_placement().secret
        fd = int(os.environ["UNIDIST_SECRET_FD"])
        try:
            os.pwrite(fd, b"x", 0)
            sealed = False
        except OSError:
            sealed = True
        visible = pathlib.Path("/proc/self/environ").read_bytes() + pathlib.Path("/proc/self/cmdline").read_bytes()
        print(json.dumps([secret.hex(), sealed, secret in visible or secret.hex().encode() in visible]))
    """
    with LocalProcesses(2) as job:
        command = (sys.executable, "-c", textwrap.dedent(code))
        ranks = [job.start(command, stdout=subprocess.PIPE) for _ in range(2)]
        (secret, sealed, visible), other = (json.loads(rank.communicate(timeout=120)[0]) for rank in ranks)
    assert len(bytes.fromhex(secret)) == 32
    assert secret == other[0]
    assert sealed
    assert not visible


def test_secret_is_found_through_the_launcher_when_a_wrapper_closed_the_descriptor() -> None:
    code = "from unidist.settings.placement import read_placement; print(len(read_placement().secret))"
    wrapper = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], close_fds=True, check=True)"
    with LocalProcesses(1) as job:
        rank = job.start((sys.executable, "-c", wrapper, code), stdout=subprocess.PIPE)
        assert rank.communicate(timeout=120)[0] == b"32\n"


def test_a_program_that_cannot_be_started_is_a_configuration_error_and_the_others_end(
    mark: str, tmp_path: Path
) -> None:
    text = tmp_path / "not_a_program"
    text.write_text("?")
    text.chmod(0o755)
    with LocalProcesses(3, env={"TEST_MARK": mark}) as job:
        job.start(("sleep", "60"))
        with pytest.raises(ConfigurationError, match=r"rank 1 of 3: cannot start '/no/such/program'"):
            job.start(("/no/such/program",))
        with pytest.raises(ConfigurationError, match="cannot start"):
            job.start((str(text),))
    assert alive(mark) == []


def test_close_kills_background_setsid_and_cleared_environment(mark: str) -> None:
    job = LocalProcesses(1, env={"TEST_MARK": mark})
    script = "sleep 1001 & setsid sleep 1002 & env -i sleep 1003 & echo $!; exit 0"
    rank = job.start(("bash", "-c", script), stdout=subprocess.PIPE)
    assert rank.stdout is not None
    cleared = psutil.Process(int(rank.stdout.readline()))
    assert rank.wait(60) == 0
    assert wait_until(lambda: sorted(p.cmdline()[-1] for p in alive(mark)) == ["1001", "1002"], 60)
    assert wait_until(lambda: cleared.cmdline() == ["sleep", "1003"], 60)
    job.close()
    rank.stdout.close()
    assert alive(mark) == []
    assert wait_until(lambda: not cleared.is_running() or cleared.status() == psutil.STATUS_ZOMBIE, 30)


def test_close_ends_what_ignores_sigterm_and_is_idempotent(mark: str) -> None:
    job = LocalProcesses(1, env={"TEST_MARK": mark})
    rank = job.start(("bash", "-c", "trap '' TERM; echo; while :; do sleep 0.1; done"), stdout=subprocess.PIPE)
    assert rank.stdout is not None
    rank.stdout.readline()
    job.signal(signal.SIGTERM)
    job.close()
    job.close()
    rank.stdout.close()
    assert rank.returncode == -signal.SIGKILL
    assert alive(mark) == []


def test_close_sweeps_by_itself_when_the_watchdog_was_killed(mark: str) -> None:
    job = LocalProcesses(1, env={"TEST_MARK": mark})
    job.start(("bash", "-c", "setsid sleep 1000 & wait"))
    assert wait_until(lambda: any(p.name() == "sleep" for p in alive(mark)), 30)
    watchdog = next(p for p in psutil.Process().children() if job.job_id in p.cmdline())
    watchdog.kill()
    job.close()
    assert alive(mark) == []


PARENT = """
import subprocess, sys, time
from unidist.jobs.processes import LocalProcesses
job = LocalProcesses(2, env={"TEST_MARK": sys.argv[1]}, die_with_thread=sys.argv[2] == "True")
for _ in range(2):
    job.start(("bash", "-c", "sleep 1001 & setsid sleep 1002 & wait"))
print("started", flush=True)
time.sleep(100)
"""


@pytest.mark.parallel
@pytest.mark.parametrize("die_with_thread", [False, True])
def test_nothing_is_left_after_kill_9_of_the_parent(mark: str, die_with_thread: bool) -> None:
    command = [sys.executable, "-c", PARENT, mark, str(die_with_thread)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert wait_until(lambda: sum(p.name() == "sleep" for p in alive(mark)) == 4, 30)
        parent.kill()
        assert wait_until(lambda: not alive(mark), 30), alive(mark)


@pytest.mark.parallel
def test_ranks_die_with_the_parent_even_if_the_watchdog_is_killed_first(mark: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, mark, "True"], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        children = psutil.Process(parent.pid).children()
        watchdog = next(p for p in children if "sweep.py" in " ".join(p.cmdline()))
        ranks = [p for p in children if p != watchdog]
        watchdog.kill()
        parent.kill()
        try:
            assert wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks), 30)
        finally:
            for left in alive(mark):  # grandchildren, whose only net was just taken away
                left.kill()


def test_a_forked_copy_of_the_parent_does_not_keep_the_watchdog_waiting(mark: str) -> None:
    fork_and_die = PARENT.replace("time.sleep(100)", "import os\nif os.fork():\n    os._exit(0)\ntime.sleep(100)")
    with subprocess.Popen([sys.executable, "-c", fork_and_die, mark, "False"], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        parent.wait(30)
        try:
            assert wait_until(lambda: not alive(mark), 30), alive(mark)
        finally:
            for copy in [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]:
                copy.kill()


def test_ranks_outlive_the_thread_that_started_them() -> None:
    with LocalProcesses(1) as job:
        thread = threading.Thread(target=job.start, args=(("sleep", "60"),))
        thread.start()
        thread.join()
        with pytest.raises(subprocess.TimeoutExpired):
            job.processes[0].wait(0.3)


def test_no_descriptor_is_left() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with LocalProcesses(1) as job:
            job.start(("true",))
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_watch_exit_becomes_readable_at_the_end_of_the_process() -> None:
    import select

    with LocalProcesses(1) as job:
        process = job.start(("sleep", "60"))
        fd = watch_exit(process)
        assert fd is not None
        assert select.select([fd], [], [], 0)[0] == []
        process.kill()
        assert select.select([fd], [], [], 60)[0] == [fd]
        os.close(fd)


def test_exits_are_described_by_code_or_signal_name() -> None:
    assert describe_exit(7) == "exit code 7"
    assert describe_exit(-9) == "killed by signal 9 (SIGKILL)"
    assert describe_exit(-63) == "killed by signal 63"
