"""`unidist horovodrun`, and the command of the distribution in the folder `horovodrun`."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from unidist_command import Command

from unidist_launch import cli

pytestmark = pytest.mark.parallel

ROOT = Path(__file__).resolve().parents[4]
SHOW = (
    "import horovod.common.exceptions as e; print(e.HorovodInternalError.__module__, os.getenv('HOROVOD_CYCLE_TIME'))"
)


def test_a_command_line_of_horovods_documentation_runs_a_script_that_imports_horovod(command: Command) -> None:
    line = ["-np", "2", "-H", "localhost:2", "-p", "12345", "--gloo", "--cycle-time-ms", "3.5", "--stall-check"]
    done = command.run("horovodrun", *line, sys.executable, command.script(SHOW))
    assert {line.partition("] ")[2] for line in done.stdout.splitlines()} == {"unidist.errors 3.5"}, done.stderr
    assert "--ssh-port: not used" in done.stderr


def test_a_configuration_file_of_horovodrun_is_carried_out_and_unknown_keys_are_warnings(command: Command) -> None:
    (command.folder / "horovod.yaml").write_text("params: {cycle_time_ms: 4, nonsense: 3}\ncontroller: mpi\n")
    line = ["horovodrun", "-np", "1", "--config-file", "horovod.yaml", sys.executable, command.script(SHOW)]
    done = command.run(*line)
    assert done.stdout == "[0] unidist.errors 4\n", done.stderr
    assert "unidist: warning: horovod.yaml: unknown option 'nonsense'" in done.stderr
    assert command.run_here("launch", *line[1:]).returncode == 2


def test_version_and_help_are_told(command: Command) -> None:
    assert command.run_here("horovodrun", "-v").stdout == command.run_here("--version").stdout != ""
    assert "--fusion-threshold-mb" in command.run_here("horovodrun", "-h").stdout


def test_the_small_distribution_has_the_command_and_nothing_else(tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):  # building leaves files behind
        (source / name).write_bytes((ROOT / "horovodrun" / name).read_bytes())
    subprocess.run([*install, "--target", str(tmp_path / "installed"), str(source)], check=True, timeout=120)
    (info,) = (tmp_path / "installed").glob("*.dist-info")
    (script,) = PathDistribution(info).entry_points
    assert (script.group, script.name) == ("console_scripts", "horovodrun")
    assert script.load() is cli.horovodrun
    assert {path.name for path in (tmp_path / "installed").iterdir()} == {info.name, "bin"}
