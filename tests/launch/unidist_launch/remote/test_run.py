"""A job over agents. Its hosts are this one, reached by a program that takes the place of ssh; sshd is not needed."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from rank_lines import rank_lines
from unidist_command import Command

from unidist.control.wire import MAGIC

NOT_SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
SSH_CONNECTION="127.0.0.1 40000 127.0.0.1 22" exec sh -c "$2"
"""
RANKS = ("launch", "-np", "3", "-H", "h1:2,h2:2", "--ssh-command")


@pytest.fixture
def not_ssh(tmp_path: Path) -> str:
    program = tmp_path / "not_ssh"
    program.write_text(NOT_SSH)
    program.chmod(0o755)
    return str(program)


def agents(command: Command) -> list[psutil.Process]:
    return [process for process in command.alive() if "unidist_launch.agent.agent" in " ".join(process.cmdline())]


def wait_for(command: Command, *names: str) -> None:
    """Wait until ranks have made these files."""
    assert command.wait_until(lambda: all((command.folder / name).exists() for name in names), 60), names


def test_ranks_know_their_place_and_print_as_on_one_host(command: Command, not_ssh: str) -> None:
    script = command.script("""
        env = os.environ
        print(env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"], env["UNIDIST_NODE_RANK"],
              env["HOROVOD_CROSS_SIZE"], env["MASTER_ADDR"], env["GIVEN"], env["EXPORTED"], repr(sys.stdin.read()))
        sys.stdout.flush()
        print("same on all", file=sys.stderr)
        sys.stdout.buffer.write(b"no newline \\xff"); sys.stdout.flush()
        secret = os.pread(int(env["UNIDIST_SECRET_FD"]), 32, 0)
        seen = b""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for name in ("cmdline", "environ"):
                try:
                    seen += open(f"/proc/{pid}/{name}", "rb").read()
                except OSError:
                    pass
        assert len(secret) == 32 and secret not in seen and secret.hex().encode() not in seen
    """)
    done = command.run(*RANKS, not_ssh, "--env", "GIVEN=g", "--output-dir", "out", script, env={"EXPORTED": "e"})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line in ("[0] 0 3 0 2 0 2", "[1] 1 3 1 2 0 2", "[2] 2 3 0 1 1 2"):
        assert f"{line} 127.0.0.1 g e ''" in lines
    assert rank_lines(done.stderr) == {rank: ["same on all"] for rank in range(3)}
    assert (command.folder / "out/rank.2/stdout").read_bytes().endswith(b"''\nno newline \xff")


def test_the_first_failure_decides_and_its_host_is_named(command: Command, not_ssh: str) -> None:
    script = command.script("""
        if rank == 2:
            raise ValueError("boom")
        time.sleep(60)
    """)
    done = command.run(*RANKS, not_ssh, script)
    assert done.returncode == 1
    assert "unidist: rank 2 failed first (host h2, pid " in done.stderr
    assert "ValueError: boom (exit code 1)" in done.stderr
    assert "unidist: ended by the launcher: ranks 0-1" in done.stderr


def test_a_rank_killed_by_a_signal_gives_its_code(command: Command, not_ssh: str) -> None:
    done = command.run(*RANKS, not_ssh, command.script("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)"))
    assert done.returncode == 137
    assert "rank 1 failed first (host h1" in done.stderr


def test_a_signal_reaches_every_rank_and_decides_the_code(command: Command, not_ssh: str) -> None:
    script = command.script("""
        def leave(number, frame):
            print("got", number, flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        open(f"ready{rank}", "w")
        for _ in range(600): time.sleep(0.1)  # a signal that comes just before a long sleep would wait for its end
    """)
    with command.start(*RANKS, not_ssh, script) as launcher:
        wait_for(command, "ready0", "ready1", "ready2")
        launcher.send_signal(signal.SIGTERM)
        out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 143, err
    assert rank_lines(out) == {rank: ["got 15"] for rank in range(3)}


def test_ranks_that_ignore_everything_are_killed_after_the_grace_period(command: Command, not_ssh: str) -> None:
    script = command.script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"ready{rank}", "w")
        while rank == 0 and not os.path.exists("ready2"): time.sleep(0.01)
        sys.exit(3) if rank == 0 else time.sleep(60)
    """)
    begin = time.monotonic()
    done = command.run(*RANKS, not_ssh, "--grace-period", "0.2", script)
    assert done.returncode == 3, done.stderr
    assert time.monotonic() - begin < 50


@pytest.mark.parametrize("victim", ["launcher", "agent"])
def test_nothing_is_left_after_kill_9_of_launcher_or_agent(command: Command, not_ssh: str, victim: str) -> None:
    script = command.script("""
        import subprocess
        if rank == 2:
            subprocess.Popen(["sleep", "300"], start_new_session=True)
        open(f"ready{rank}", "w")
        time.sleep(300)
    """)
    with command.start(*RANKS, not_ssh, script) as launcher:
        wait_for(command, "ready0", "ready1", "ready2")
        if victim == "launcher":
            launcher.kill()
        else:
            agents(command)[0].kill()
        _, err = launcher.communicate(timeout=60)
        assert command.wait_until(lambda: not command.alive(), 60), command.alive()
    if victim == "agent":
        assert launcher.returncode == 1
        assert " was lost: its connection ended" in err
        assert "ran there)" in err


def test_what_one_host_cannot_run_ends_the_job_before_its_script_matters(command: Command, not_ssh: str) -> None:
    program = command.folder / "program"
    program.write_text("no interpreter line, no machine code")
    program.chmod(0o755)
    done = command.run(*RANKS, not_ssh, str(program))
    assert done.returncode == 2
    assert "cannot start" in done.stderr
    assert "host h" in done.stderr


def test_every_host_that_cannot_take_part_is_told_at_once(command: Command, tmp_path: Path) -> None:
    program = tmp_path / "bad_ssh"
    program.write_text('#!/bin/sh\nwhile [ $# -gt 2 ]; do shift; done\necho "$1: Connection refused" >&2; exit 255\n')
    program.chmod(0o755)
    done = command.run(*RANKS, str(program), command.script("open('ran', 'w')"))
    assert done.returncode == 2
    for host in ("h1", "h2"):
        assert f"  host {host}: no ssh server listens there" in done.stderr
    assert not (command.folder / "ran").exists()


def test_a_host_that_never_answers_is_told_after_the_start_timeout(command: Command, tmp_path: Path) -> None:
    program = tmp_path / "slow_ssh"
    program.write_text("#!/bin/sh\nexec sleep 300\n")
    program.chmod(0o755)
    done = command.run(*RANKS, str(program), "--start-timeout", "0.5", command.script(""))
    assert done.returncode == 2
    assert "no answer from h1, h2 in 0.5 seconds" in done.stderr


def test_strangers_on_the_control_port_do_not_disturb_the_job(command: Command, not_ssh: str) -> None:
    script = command.script("""
        open(f"ready{rank}", "w").write(os.environ["UNIDIST_CONTROL_ADDRESS"]); os.rename(f"ready{rank}", f"port{rank}")
        while not os.path.exists("go"): time.sleep(0.01)
        print("went on")
    """)
    with command.start(*RANKS, not_ssh, script) as launcher:
        wait_for(command, "port0", "port1", "port2")
        host, _, port = (command.folder / "port0").read_text().rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(8)]
        for number, stranger in enumerate(strangers[:3]):
            stranger.sendall(os.urandom(64 * (number + 1)))
        strangers[3].sendall(MAGIC + os.urandom(64))  # a nonce and a proof
        (command.folder / "go").touch()
        out, err = launcher.communicate(timeout=60)
        for stranger in strangers:
            stranger.close()
    assert launcher.returncode == 0, err
    assert rank_lines(out) == {rank: ["went on"] for rank in range(3)}
    assert "no control client of unidist" in err
    assert "does not know the job's secret" in err


@pytest.mark.soak
def test_a_reader_that_pauses_holds_the_ranks_up_and_loses_no_host(command: Command, not_ssh: str) -> None:
    script = command.script("""
        for i in range(40000):
            print(i, rank, "x" * 300)
    """)
    with command.start(*RANKS, not_ssh, script, env={"UNIDIST_HEARTBEAT_SEC": "2"}) as launcher:
        assert launcher.stdout is not None
        first = os.read(launcher.stdout.fileno(), 100).decode()  # not by its buffer, which communicate() passes by
        time.sleep(8)  # four heartbeats: what is tested is that nothing happens meanwhile
        assert launcher.poll() is None
        out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, err
    assert (first + out).count("\n") == 120000


def test_sigterm_to_an_agent_ends_the_job_as_one_to_the_launcher(command: Command, not_ssh: str) -> None:
    """As a scheduler does that takes a host back: the ranks of all hosts get the time to leave."""
    script = command.script("""
        def leave(number, frame):
            print("got", number, flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        open(f"ready{rank}", "w")
        for _ in range(600): time.sleep(0.1)
    """)
    with command.start(*RANKS, not_ssh, script) as launcher:
        wait_for(command, "ready0", "ready1", "ready2")
        agents(command)[0].terminate()
        out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 143, err
    assert rank_lines(out) == {rank: ["got 15"] for rank in range(3)}
