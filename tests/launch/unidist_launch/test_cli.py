"""The `unidist` command as a whole: start-up, its own errors, and that the docs name every option."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest
from unidist_command import Command

from unidist_launch.cli import cli

DOCS = Path(__file__).parents[3] / "docs" / "cli.md"


HELP = """
import sys
from unidist_launch.cli import main
try:
    main(["launch", "--help"])
finally:
    heavy = {"torch", "tensorflow", "keras", "numpy", "jax"} & set(sys.modules)
    print("heavy:", sorted(heavy), file=sys.stderr)
    print("modules:", len(sys.modules), file=sys.stderr)
"""


def test_help_imports_little_and_no_framework_nor_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "--allreduce-algorithm" in done.stdout
    heavy, modules = done.stderr.splitlines()
    assert heavy == "heavy: []"
    assert int(modules.removeprefix("modules: ")) < 380, "it has to be quick: plugins import when they are used"


@pytest.mark.soak  # processor time depends on what else the machine does
def test_help_is_quick() -> None:
    seconds = []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Processor time: what an idle machine would take, on a busy one too.
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
        if seconds[-1] < 0.25:
            return  # what shares the core and its caches can only make it slower
    pytest.fail(f"processor time of `unidist launch --help`: {seconds}")


@pytest.mark.parallel
def test_launching_imports_no_framework_nor_numpy(command: Command) -> None:
    probe = """
import sys
from unidist_launch.cli import main
try:
    main(sys.argv[1:])
finally:
    print("numpy" in sys.modules, "torch" in sys.modules)
"""
    line = [sys.executable, "-c", probe, "launch", "-np", "1", "true"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "False False\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lunch",), "unknown command 'lunch'. Did you mean 'launch'?"),
        (("launch", "-np", "0", "x.py"), "0 is not in the range"),
        (("launch", "-np", "two", "x.py"), "'two' is not an integer; give 1 or more"),
        (("launch", "--min-np", "2", "x.py"), "Missing option '-np'"),
        (("run", "-np", "2", "x.py"), "there is no command 'run'; to start a script, write `unidist launch -np 2"),
        (("x.py",), "there is no command 'x.py'; to start a script, write `unidist launch -np 2 x.py`"),
        (("launch", "-np", "2", "--engin", "shm", "x.py"), "No such option '--engin'"),
        (("launch", "-np", "2", "none.py"), "script 'none.py' does not exist"),
        (("launch", "-np", "2"), "nothing to run"),
        (("launch", "-np", "1000000", "true"), "open files"),
    ],
)
def test_a_wrong_command_is_one_clean_error_with_exit_code_2(
    command: Command, arguments: tuple[str, ...], message: str
) -> None:
    check_one_error(command.run_here(*arguments), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lunch",), "unknown command 'lunch'. Did you mean 'launch'?"),
        (("launch", "-np", "2", "--engin", "shm", "x.py"), "No such option '--engin'"),
    ],
)
def test_a_process_of_a_wrong_command_ends_with_the_same(
    command: Command, arguments: tuple[str, ...], message: str
) -> None:
    check_one_error(command.run(*arguments), message)


def check_one_error(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("unidist: error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parallel
@pytest.mark.parametrize("arguments", [(), ("checkpoint",)])
def test_a_group_alone_shows_its_help_and_calls_it_no_error(command: Command, arguments: tuple[str, ...]) -> None:
    done = command.run_here(*arguments)
    shown = done.stdout + done.stderr
    assert shown.startswith(" ".join(["Usage: unidist", *arguments]))
    assert "error" not in shown
    assert shown.count("--help") == 1
    assert done.returncode in (0, 2)  # click's own choice was 0 before 8.2


def test_the_docs_name_every_command_and_every_option() -> None:
    text = DOCS.read_text()
    context = click.Context(cli)
    names = ["launch", "doctor", "plugins"]
    assert set(names) <= set(cli.list_commands(context))
    missing = []
    for name in names:
        found = cli.get_command(context, name)
        assert found is not None
        shown = [
            item
            for item in found.get_params(click.Context(found))
            if isinstance(item, click.Option) and not item.hidden
        ]
        options = [opt for item in shown for opt in (*item.opts, *item.secondary_opts)]
        missing += [item for item in (f"unidist {name}", *options) if item not in text]
    assert missing == []


@pytest.mark.parallel
@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_job_ends_whichever_streams_of_the_launcher_are_closed(closed: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint('out')\nprint('error', file=sys.stderr)\nsys.stdin.read()\n")
    line = [sys.executable, "-m", "unidist_launch", "launch", "-np", "2", str(script)]
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *line], timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parallel
def test_the_launcher_keeps_its_exit_code_under_pythoninspect(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "unidist_launch", "launch", "-np", "1", "true"]
    environment = {**os.environ, "PYTHONINSPECT": "1"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
