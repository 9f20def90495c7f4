"""Whole jobs on this host: output, failures, signals, and nothing left behind (the `command` fixture checks that)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rank_lines import rank_lines
from unidist_command import Command

pytestmark = pytest.mark.parallel


def ready(process: subprocess.Popen[str], lines: int) -> None:
    """Wait until the ranks have printed so many lines."""
    assert process.stdout is not None
    for _ in range(lines):
        assert process.stdout.readline()


def test_lines_carry_their_rank_and_equal_ones_are_folded(command: Command) -> None:
    script = command.script(
        """
        print("own", rank)
        for turn in range(20):  # all print within the window; not in each, where the machine is busy
            open(f"here.{turn}.{rank}", "w").close()
            while sum(name.startswith(f"here.{turn}.") for name in os.listdir()) < 3:
                time.sleep(0.001)
            print("same", turn, flush=True)
            print("err", turn, file=sys.stderr, flush=True)
        """
    )
    done = command.run("launch", "-np", "3", script)
    assert done.returncode == 0
    same, errors = ([f"{word} {turn}" for turn in range(20)] for word in ("same", "err"))
    assert rank_lines(done.stdout) == {rank: [f"own {rank}", *same] for rank in range(3)}
    assert rank_lines(done.stderr) == dict.fromkeys(range(3), errors)
    assert {f"[0-2] {line}" for line in same} & set(done.stdout.splitlines())
    assert {f"[0-2!] {line}" for line in errors} & set(done.stderr.splitlines())


def test_eight_ranks_lose_no_line_and_keep_their_order(command: Command) -> None:
    script = command.script("for i in range(10_000): print(f'{rank}:{i}')")
    lines = command.run("launch", "-np", "8", script).stdout.splitlines()
    assert len(lines) == 80_000
    for rank in range(8):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {rank}:{i}" for i in range(10_000)]


def test_odd_output_arrives_whole(command: Command) -> None:
    script = command.script(
        r"""
        out = sys.stdout.buffer
        out.write(b"\xff\xfe not utf-8\n" + b"x" * 3_000_000 + b"\n" + b"1%\r2%\r3%\n" + b"\n" + b"no newline")
        """
    )
    done = command.run("launch", "-np", "1", script)
    data = done.stdout.encode(errors="surrogateescape")
    # Of a progress bar the last frame.
    expected = [b"\xff\xfe not utf-8", b"x" * 3_000_000, b"3%", b"", b"no newline"]
    assert data == b"".join(b"[0] " + line + b"\n" for line in expected)


def test_output_dir_holds_every_stream_byte_for_byte(command: Command) -> None:
    script = command.script(r"sys.stdout.buffer.write(b'a\xff\r\nb%d' % rank); sys.stderr.write('e')")
    done = command.run("launch", "-np", "2", "--output-dir", "out/put", "--quiet", script)
    assert done.returncode == 0
    for rank in range(2):
        assert (command.folder / f"out/put/rank.{rank}/stdout").read_bytes() == b"a\xff\r\nb%d" % rank
        assert (command.folder / f"out/put/rank.{rank}/stderr").read_bytes() == b"e"


def test_quiet_shows_output_of_rank_0_and_errors_of_all(command: Command) -> None:
    script = command.script("print('out', rank); print('err', rank, file=sys.stderr)")
    done = command.run("launch", "-np", "2", "--quiet", script)
    assert done.stdout == "[0] out 0\n"
    assert {"[0!] err 0", "[1!] err 1"} <= set(done.stderr.splitlines())


def test_rank_0_reads_standard_input_and_the_others_nothing(command: Command) -> None:
    script = command.script("print(repr(sys.stdin.read()))")
    line = [sys.executable, "-m", "unidist_launch", "launch", "-np", "2", script]
    done = subprocess.run(
        line, cwd=command.folder, input="hello", capture_output=True, text=True, timeout=60, check=False
    )
    assert sorted(done.stdout.splitlines()) == ["[0] 'hello'", "[1] ''"]


@pytest.mark.parametrize(
    ("last_act", "code", "cause"),
    [
        ("sys.exit(7)", 7, r"exit code 7"),
        ("raise ValueError('boom')", 1, r"ValueError: boom \(exit code 1\)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, r"killed by signal 9 \(SIGKILL\)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, r"killed by signal 11 \(SIGSEGV\)"),
    ],
)
def test_the_first_failure_decides_report_and_exit_code(command: Command, last_act: str, code: int, cause: str) -> None:
    script = command.script(f"if rank == 1:\n    {last_act}\ntime.sleep(100)")
    started = time.monotonic()
    done = command.run("launch", "-np", "3", script)
    assert done.returncode == code
    assert re.search(rf"^unidist: rank 1 failed first \(host \S+, pid \d+\): {cause}$", done.stderr, re.MULTILINE)
    assert "unidist: ended by the launcher: ranks 0,2" in done.stderr
    assert done.stderr.endswith(f"unidist: exit code {code}\n")
    assert time.monotonic() - started < 50  # the others sleep for longer
    if code == 139:
        assert 'script.py", line 4 in <module>' in done.stderr  # where it happened, by faulthandler


def test_ranks_that_notice_a_dead_peer_are_not_blamed_for_it(command: Command) -> None:
    script = command.script(
        """
        from unidist.errors import PeerLostError
        if rank == 1:
            while sum(name.startswith("noticed.") for name in os.listdir()) < 2:  # the launcher waits for a while only
                time.sleep(0.001)
            time.sleep(0.2)
            sys.exit(9)
        open(f"noticed.{rank}", "w").close()
        raise PeerLostError("rank 1 is gone")
        """
    )
    done = command.run("launch", "-np", "3", script)
    assert done.returncode == 9
    assert "unidist: rank 1 failed first" in done.stderr
    assert "unidist: failed in consequence: ranks 0,2 (PeerLostError)" in done.stderr
    assert "Traceback" not in done.stderr  # the culprit has none, and theirs do not matter


def test_an_error_is_shown_once_without_the_frames_of_unidist(command: Command) -> None:
    script = command.script(
        """
        import unidist.torch as ud, torch
        ud.init()
        def train():
            if rank == 1 and "own" in sys.argv:
                raise ValueError("the batch is odd")
            ud.allreduce(torch.ones(3), name="accuracy" if rank else "loss")
        train()
        """
    )
    done = command.run("launch", "-np", "3", script, "own")
    lines = done.stderr.splitlines()
    assert [line for line in lines if "Traceback" in line] == ["[1!] Traceback (most recent call last):"]
    assert [line.strip() for line in lines if "script.py" not in line][:4] == [
        "[1!] Traceback (most recent call last):",
        "[1!]     train()",
        '[1!]     raise ValueError("the batch is odd")',
        "[1!] ValueError: the batch is odd",
    ]
    assert not any("PeerLostError: " in line for line in lines)

    done = command.run("launch", "-np", "3", script)  # a deadlock: every rank raises the same
    lines = done.stderr.splitlines()
    assert sum("Traceback" in line for line in lines) == 1, done.stderr
    assert sum("rank 0 waits in allreduce 'loss'" in line for line in lines) == 1
    (fold,) = (line for line in lines if "frames of unidist" in line)
    assert re.fullmatch(r"\[\d!\]   \.\.\. \d+ frames of unidist \(--full-tracebacks shows them\)", fold)
    assert not any("negotiator.py" in line for line in lines)
    assert sum("unidist: all ranks raised together: unidist.errors.DeadlockError" in line for line in lines) == 1

    done = command.run("launch", "-np", "3", "--full-tracebacks", script, "own")
    assert "negotiator.py" in done.stderr
    assert "PeerLostError: " in done.stderr
    assert "ud.join()" not in done.stderr  # a rank that raises has not just ended


def test_a_rank_that_logs_a_traceback_and_goes_on_is_heard(command: Command) -> None:
    script = command.script(
        """
        import traceback
        try:
            raise ValueError("not so bad")
        except ValueError:
            traceback.print_exc()
        while not os.path.exists("heard"):
            time.sleep(0.01)
        """
    )
    process = command.start("launch", "-np", "1", script)
    assert process.stderr is not None
    assert any("ValueError: not so bad" in line for line in iter(process.stderr.readline, ""))
    (command.folder / "heard").touch()
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_forwarded_and_decide_the_exit_code(command: Command, number: signal.Signals) -> None:
    script = command.script(
        """
        def leave(number, frame):
            print("got", number)
            sys.exit(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, leave)
        print("ready", rank)
        time.sleep(100)
        """
    )
    with command.start("launch", "-np", "2", script) as process:
        ready(process, 2)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert out.count(f"got {number.value}") in (1, 2)  # folded or not
    assert f"unidist: ended by {number.name}" in err


STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, lambda *_: print("interrupted", rank))
print("ready", rank)
while True:
    time.sleep(100)
"""


def test_what_ignores_sigterm_is_killed_after_the_grace_period(command: Command) -> None:
    with command.start("launch", "-np", "2", "--grace-period", "0.5", command.script(STUBBORN)) as process:
        ready(process, 2)
        started = time.monotonic()
        process.terminate()
        assert process.wait(30) == 143
        assert 0.5 <= time.monotonic() - started < 30
        process.communicate()


def test_a_second_interrupt_kills_at_once(command: Command) -> None:
    with command.start("launch", "-np", "2", "--grace-period", "100", command.script(STUBBORN)) as process:
        ready(process, 2)
        process.send_signal(signal.SIGINT)
        ready(process, 2)  # the ranks have had the first: two that come together would be one
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == 130


def test_a_failed_jobs_stubborn_rank_is_killed_too(command: Command) -> None:
    script = command.script("if rank == 1:\n    time.sleep(0.5)\n    sys.exit(5)" + STUBBORN)
    done = command.run("launch", "-np", "2", "--grace-period", "0.3", script)
    assert done.returncode == 5


def test_nohup_is_respected(command: Command) -> None:
    line = [
        sys.executable,
        "-m",
        "unidist_launch",
        "launch",
        "-np",
        "1",
        command.script("print('ready')\ntime.sleep(1)\nprint('end')"),
    ]
    with subprocess.Popen(
        ["nohup", *line], cwd=command.folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        ready(process, 1)
        process.send_signal(signal.SIGHUP)
        assert process.communicate(timeout=120)[0] == "[0] end\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    "line",
    [
        ("script.py",),
        ("bash", "-c", f"{sys.executable} script.py & wait"),
        ("bash", "-c", f"setsid {sys.executable} script.py & wait"),
    ],
    ids=["script", "wrapper", "setsid"],
)
def test_nothing_is_left_after_kill_9_of_the_launcher(command: Command, line: tuple[str, ...]) -> None:
    command.script("print('ready', rank)\ntime.sleep(100)")
    with command.start("launch", "-np", "2", *line) as process:
        ready(process, 2)
        process.kill()
        assert command.wait_until(lambda: not command.alive(), 30), command.alive()
        process.communicate()


def test_what_ranks_leave_in_the_background_ends_with_the_job(command: Command) -> None:
    done = command.run("launch", "-np", "2", "bash", "-c", "setsid sleep 100 & sleep 100 & echo done")
    assert done.returncode == 0
    assert done.stdout.count("done") in (1, 2)  # folded or not


def test_two_jobs_at_once_do_not_meet(command: Command) -> None:
    script = command.script("print(os.environ['MARK'], os.environ['UNIDIST_JOB_ID'])\ntime.sleep(0.3)")
    jobs = [command.start("launch", "-np", "2", "--env", f"MARK={mark}", script) for mark in "ab"]
    outputs = [job.communicate(timeout=120)[0].splitlines() for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    (first,), (second,) = ({line.partition("] ")[2] for line in output} for output in outputs)  # one line per job
    assert first.split()[0] != second.split()[0]
    assert first.split()[1] != second.split()[1]


def test_a_reader_that_goes_away_ends_the_job_quietly(command: Command) -> None:
    script = command.script("while True: print(rank, 'x' * 1000)")
    with command.start("launch", "-np", "2", script) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        ready(process, 1)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(30) == 128 + signal.SIGPIPE
    assert "Error" not in err.replace("BrokenPipeError", "")  # of the plugins found, none is at fault
    assert "Exception ignored" not in err


def test_a_full_disk_under_standard_output_is_told(command: Command) -> None:
    line = [sys.executable, "-m", "unidist_launch", "launch", "-np", "1", command.script("print('x')\ntime.sleep(100)")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            line, cwd=command.folder, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert "cannot write to standard output" in done.stderr
    assert "No space left" in done.stderr


def test_a_stopped_reader_does_not_keep_the_launcher_from_ending(command: Command) -> None:
    script = command.script("while True: print(rank, 'x' * 1000)")
    with command.start("launch", "-np", "2", "--grace-period", "0.2", script) as process:
        ready(process, 1)  # and from now on nobody reads
        assert command.wait_until(lambda: _waiting_bytes(process) > 30_000, 60)  # full: pages may be part empty
        process.terminate()
        assert process.wait(30) == 143


def test_a_terminal_shows_colours_progress_in_place_and_a_status_line(command: Command) -> None:
    script = command.script(
        r"""
        if rank == 0:
            for i in range(4):
                sys.stderr.write(f"\r{i}0%")
                time.sleep(0.4)
            sys.stderr.write("\n")
        time.sleep(2)
        """
    )
    shown = _on_a_terminal([sys.executable, "-m", "unidist_launch", "launch", "-np", "2", script], command.folder)
    assert re.search(r"\x1b\[[\d;]+m\[0!\]\x1b\[0m ", shown)  # a coloured prefix
    assert re.search(r"\r\x1b\[K\[0\] [123]0%", shown)  # the bar while it runs
    assert re.search(r"unidist  0:0\d:\d\d  [12] of 2 ranks running", shown)
    assert shown.rstrip().endswith("\x1b[K")  # and the status line is gone at the end


def test_a_terminal_that_is_closed_ends_the_job_with_its_grace_period(command: Command) -> None:
    script = command.script(
        """
        def leave(*_):
            time.sleep(0.6)  # the live line falls due
            open("left", "w").close()
            sys.exit()

        signal.signal(signal.SIGHUP, leave)
        while True:
            print("on", flush=True)
            time.sleep(0.01)
        """
    )
    words = [sys.executable, "-m", "unidist_launch", "launch", "-np", "1", script]
    pid, ours = pty.fork()
    if pid == 0:
        os.chdir(command.folder)
        os.execve(sys.executable, words, {**os.environ, "TEST_MARK": command.mark})
    shown = b""
    while b"lines/s" not in shown or b"on\r\n" not in shown:  # the live line is there, and the rank's handler
        shown += os.read(ours, 65536)
    os.close(ours)
    assert command.wait_until(lambda: not command.alive(), 30)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert (command.folder / "left").exists()


def _waiting_bytes(process: subprocess.Popen[str]) -> int:
    """Return how much output the launcher has written that nobody has read."""
    assert process.stdout is not None
    return int.from_bytes(fcntl.ioctl(process.stdout.fileno(), termios.FIONREAD, b"1234"), sys.byteorder)


def _on_a_terminal(line: list[str], folder: Path) -> str:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    shown = bytearray()
    with subprocess.Popen(line, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        deadline = time.monotonic() + 100
        with contextlib.suppress(OSError):  # EIO: the terminal's last writer is gone
            while time.monotonic() < deadline:
                if select.select([ours], [], [], 0.1)[0]:
                    shown += os.read(ours, 65536)
        os.close(ours)
        assert process.wait(30) == 0
    return shown.decode()


def test_a_strategy_that_no_rank_has_taken_up_is_a_warning(command: Command) -> None:
    warning = "warning: --strategy identity had no effect: no rank has called init(), so each of the 2 processes"
    alone = command.script("print('trained')")
    fails = command.script("raise SystemExit(3)", "fails.py")
    uses = command.script("from unidist.runtime import context; context.init(); context.shutdown()", "uses.py")
    given = ("launch", "-np", "2", "--strategy", "identity")
    done = command.run(*given, alone)
    assert done.returncode == 0
    assert done.stderr.count(warning) == 1
    assert warning in command.run("launch", "-np", "2", alone, env={"UNIDIST_STRATEGY": "identity"}).stderr
    assert "no effect" not in command.run("launch", "-np", "2", alone).stderr
    assert "no effect" not in command.run(*given, uses).stderr
    # A program that closes what it inherits, as Python's subprocess does.
    starts = command.script(f"import subprocess; sys.exit(subprocess.call([sys.executable, {uses!r}]))", "starts.py")
    assert "no effect" not in command.run(*given, starts).stderr
    assert "no effect" not in command.run(*given, fails).stderr


def test_what_a_rank_imports_before_init_stays_out_of_garbage_collections(command: Command) -> None:
    script = command.script(
        """
        import gc
        from unidist.runtime import context
        assert gc.get_freeze_count() == 0
        context.init()
        frozen = gc.get_freeze_count()
        context.shutdown()
        context.init()
        print(frozen > 1000, gc.get_freeze_count() <= frozen)
        """
    )
    done = command.run("launch", "-np", "1", script)
    assert done.stdout.splitlines() == ["[0] True True"], done.stderr
