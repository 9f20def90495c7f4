"""Options that plugins add to `unidist launch`, and what happens to them when the plugin is switched off."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from unidist_command import Command

BELL = """
import click
from unidist import hookimpl
from unidist.launcher import JobObserver
from unidist_launch.observers import ObserverSpec

class Bell(JobObserver):
    def start(self, job):
        job.message(f"the bell watches {job.num_proc} ranks")

def bell(options, is_elastic, plugins):
    return Bell() if options["ring"] else None

@hookimpl
def unidist_register_observers(registry):
    registry.add(ObserverSpec("bell", "plugin_bell:bell", "rings", (click.Option(["OPTION"]),)))
"""


@pytest.fixture
def bell(tmp_path: Path) -> dict[str, str]:
    """Install the plugin into the folder of the command; return the environment in which ranks find it, too."""
    info = tmp_path / "dist_bell-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dist-bell\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[unidist]\nbell = plugin_bell\n")
    (tmp_path / "plugin_bell.py").write_text(BELL.replace("OPTION", "--ring"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}


@pytest.mark.parallel
@pytest.mark.parametrize("given", ["command line", "file"])
def test_an_option_of_an_observer_works_like_any_other(
    command: Command, tmp_path: Path, bell: dict[str, str], given: str
) -> None:
    assert "--ring" in command.run_here("launch", "--help").stdout
    (tmp_path / "job.yaml").write_text("ring: loud\n")
    options = ["--ring", "loud"] if given == "command line" else ["--config", "job.yaml"]
    done = command.run("launch", "-np", "1", "--min-np", "1", *options, "true", env=bell)
    assert (done.returncode, "the bell watches 1 ranks" in done.stderr) == (0, True), done.stderr


@pytest.mark.parametrize("off", [("-p", "no:bell"), ("-pno:bell",), ("--plugin=no:bell",), ()])
def test_without_its_plugin_an_option_is_unknown(command: Command, bell: dict[str, str], off: tuple[str, ...]) -> None:
    env = {} if off else {"UNIDIST_DISABLE_PLUGINS": "bell"}
    done = command.run_here("launch", *off, "-np", "1", "--ring", "loud", "true", env=env)
    assert done.returncode == 2
    assert "No such option '--ring'" in done.stderr or "No such option: --ring" in done.stderr
    assert "--ring" not in command.run_here("launch", *off, "--help", env=env).stdout


def test_a_plugin_that_a_file_switches_off_has_no_options(
    command: Command, tmp_path: Path, bell: dict[str, str]
) -> None:
    (tmp_path / "job.yaml").write_text("plugin: ['no:bell']\n")
    done = command.run("launch", "--config", "job.yaml", "-np", "1", "--ring", "loud", "true", env=bell)
    assert (done.returncode, "--ring" in done.stderr) == (2, True)


def test_an_option_that_is_taken_is_a_warning(command: Command, tmp_path: Path, bell: dict[str, str]) -> None:
    (tmp_path / "plugin_bell.py").write_text(BELL.replace("OPTION", "--engine"))
    _, done = command.job_here("launch", "-np", "1", "true")
    assert "observer 'bell' of plugin 'bell' (dist-bell): there is an option --engine already" in done.stderr
