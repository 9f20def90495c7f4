"""The helper that runs the `unidist` command in this process shows what a user sees, and hides nothing."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from unidist_command import Command

from unidist_launch.cli import cli


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """A function that makes the command `unidist probe` of a function."""
    found: dict[str, click.Command] = {}
    known = type(cli).get_command
    monkeypatch.setattr(type(cli), "get_command", lambda self, ctx, name: found.get(name) or known(self, ctx, name))
    resolve = click.Group.resolve_command
    monkeypatch.setattr(type(cli), "resolve_command", resolve)

    def add(function: Callable[[], object]) -> None:
        found["probe"] = click.Command("probe", callback=function)

    return add


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (("--help",), {}),
        (("launch", "--help"), {"COLUMNS": "61"}),
        (("plugins",), {}),
        (("lunch",), {}),
        (("launch", "-np", "2", "none.py"), {"UNIDIST_DISABLE_PLUGINS": "torch"}),
        (("launch", "-np", "two", "true"), {}),
    ],
    ids=lambda item: " ".join(item),
)
def test_code_and_output_are_those_of_a_process(
    command: Command, arguments: tuple[str, ...], env: dict[str, str]
) -> None:
    alone, here = command.run(*arguments, env=env), command.run_here(*arguments, env=env)
    assert (here.returncode, here.stdout, here.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    assert here.stdout + here.stderr


def test_the_process_is_left_as_it_was(
    command: Command, probe: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAYS", "yes")
    (command.folder / "module_of_the_folder.py").write_text("value = 3\n")

    def spoil() -> int:
        import module_of_the_folder  # type: ignore[import-not-found]  # is written above

        assert Path.cwd() == command.folder
        assert (os.environ["STAYS"], os.environ["GIVEN"]) == ("no", "yes")
        os.environ.update(LEFT="behind", GIVEN="no")
        del os.environ["STAYS"]
        os.chdir("/")
        sys.path.insert(0, "/nowhere")
        logging.getLogger("unidist.plugins").setLevel(logging.ERROR)
        logging.getLogger("unidist").warning("told")
        os.write(1, b"by C\n")
        return int(module_of_the_folder.value)

    probe(spoil)
    logger = logging.getLogger("unidist")
    before = (Path.cwd(), dict(os.environ), list(sys.path), list(sys.argv), logger.handlers[:], logger.propagate)
    streams = (sys.stdin, sys.stdout, sys.stderr, [os.readlink(f"/proc/self/fd/{number}") for number in range(3)])
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        done = command.run_here("probe", env={"STAYS": "no", "GIVEN": "yes"})
        assert (done.returncode, done.stdout, done.stderr) == (3, "by C\n", "unidist: warning: told\n")
    after = (Path.cwd(), dict(os.environ), list(sys.path), list(sys.argv), logger.handlers[:], logger.propagate)
    assert after == before
    assert (sys.stdin, sys.stdout, sys.stderr, [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]) == (
        streams
    )
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert logging.getLogger("unidist.plugins").level == logging.NOTSET
    assert logging.getLevelName(logging.WARNING) == "WARNING"
    assert "module_of_the_folder" not in sys.modules


@pytest.mark.parametrize(
    "act",
    [
        lambda: subprocess.run(["true"]),
        lambda: os.system("true"),
        lambda: os.execvp("true", ["true"]),
        lambda: os.fork(),
        lambda: threading.Thread(target=print).start(),
        lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    ],
    ids=["subprocess", "system", "exec", "fork", "thread", "signal"],
)
def test_a_command_that_starts_something_is_an_error_though_it_catches_it(
    command: Command, probe: Callable[[Callable[[], object]], None], act: Callable[[], object]
) -> None:
    def caught() -> None:
        try:
            act()
        except Exception as exc:
            print("caught", type(exc).__name__)

    probe(caught)
    with pytest.raises(AssertionError, match="run_here is for commands that start nothing"):
        command.run_here("probe")
    assert subprocess.run(["true"], check=True).returncode == 0


@pytest.mark.parametrize(("code", "returned"), [(None, 0), (7, 7), (-1, 255), ("no", 1)])
def test_exit_codes_are_those_of_the_interpreter(
    command: Command, probe: Callable[[Callable[[], object]], None], code: object, returned: int
) -> None:
    probe(lambda: sys.exit(code))  # type: ignore[arg-type]  # whatever sys.exit takes
    done = command.run_here("probe")
    assert (done.returncode, done.stderr) == (returned, "no\n" if code == "no" else "")


def test_an_error_of_the_command_itself_is_one_of_the_test(
    command: Command, probe: Callable[[Callable[[], object]], None]
) -> None:
    probe(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command.run_here("probe")


def test_variables_that_only_a_new_process_reads_are_refused(command: Command) -> None:
    with pytest.raises(AssertionError, match="PYTHONPATH: read when a process starts"):
        command.run_here("--help", env={"PYTHONPATH": "x"})


def test_a_plugin_that_was_switched_off_is_there_again(command: Command) -> None:
    assert "estimate" not in command.run_here("--help", env={"UNIDIST_DISABLE_PLUGINS": "planner"}).stdout
    assert "estimate" in command.run_here("--help").stdout


def test_a_job_is_handed_over_and_not_started(command: Command) -> None:
    job, done = command.job_here("launch", "-np", "3", "--timeout", "4", command.script("open('started', 'w')"))
    assert (job.num_proc, job.env["UNIDIST_TIMEOUT_SEC"], job.elastic, done.stdout) == (3, "4", None, "")
    job, _ = command.job_here("launch", "-np", "3", "--min-np", "2", "script.py")
    assert job.elastic is not None
    assert not (command.folder / "started").exists()
