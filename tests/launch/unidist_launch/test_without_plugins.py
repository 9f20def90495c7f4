"""Each plugin that extends the launcher can be deleted: the launcher works without it."""

from __future__ import annotations

import configparser
import os
from pathlib import Path

import pytest
from unidist_command import Command

ROOT = Path(__file__).resolve().parents[3]

HIDE = """
import sys

class Hide:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "{package}":
            raise ModuleNotFoundError(f"No module named {{name!r}}: it is hidden", name=name)

sys.meta_path.insert(0, Hide)
"""
BROUGHT = {
    "slurm": ("slurm", "--help"),
    "kubernetes": ("kubernetes", "--help"),
    "mpi_launch": ("launch", "-np", "1", "--launcher", "mpi", "true"),
    "status": ("launch", "-np", "1", "--min-np", "1", "--status-port", "0", "true"),
    "planner": ("doctor", "--measure", "here.json"),
}
"""A command that only works with the plugin."""


def complaints(text: str) -> list[str]:
    """Return the lines about plugins of ours; others that are installed here may be broken."""
    return [line for line in text.splitlines() if "unidist-train" in line]


def check_ranks(command: Command, *options: str, env: dict[str, str] | None = None) -> None:
    """Launch two ranks, and see that both print."""
    done = command.run("launch", *options, command.script("print('rank', rank)"), env=env)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] rank 0", "[1] rank 1"])
    assert complaints(done.stderr) == []


@pytest.fixture
def without(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """Return an environment in which a plugin is deleted with its lines in setup.cfg."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    entries = setup["options.entry_points"]["unidist"].strip().splitlines()
    kept = [line for line in entries if line.partition("=")[0].strip() != request.param]
    assert len(kept) == len(entries) - 1
    folder = tmp_path / "hidden"
    info = folder / "unidist_train-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unidist-train\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[unidist]", *kept, ""]))
    (folder / "sitecustomize.py").write_text(HIDE.format(package=f"unidist_{request.param}"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


@pytest.mark.parallel
@pytest.mark.parametrize(("without", "brought"), BROUGHT.items(), indirect=["without"], ids=list(BROUGHT))
def test_the_launcher_works_without_a_plugin(
    command: Command, without: dict[str, str], brought: tuple[str, ...]
) -> None:
    shown = command.run("--help", env=without)
    assert (shown.returncode, complaints(shown.stderr)) == (0, [])
    check_ranks(command, "-np", "2", env=without)
    missing = command.run(*brought, env=without)
    assert missing.returncode == 2
    assert "unidist: error: " in missing.stderr
    assert "hidden" not in missing.stderr  # nothing tries to import it


@pytest.mark.parallel
@pytest.mark.parametrize("name", BROUGHT)
def test_the_launcher_works_with_a_plugin_switched_off(command: Command, name: str) -> None:
    options = ("-p", f"no:{name}", "-np", "2")
    if name == "status":  # whose observer has a part in the job itself
        check_ranks(command, *options)
    else:
        job, done = command.job_here("launch", *options, command.script("print('rank', rank)"))
        assert (job.num_proc, job.env["UNIDIST_DISABLE_PLUGINS"]) == (2, name)
        assert complaints(done.stderr) == []


@pytest.mark.parallel
@pytest.mark.parametrize("without", ["status"], indirect=True)
def test_an_elastic_job_needs_no_status_page(command: Command, without: dict[str, str]) -> None:
    done = command.run("launch", "-np", "2", "--min-np", "1", command.script("print('rank', rank)"), env=without)
    printed = set(done.stdout.splitlines())
    assert done.returncode == 0
    assert printed
    assert printed <= {"[0] rank 0", "[1] rank 1"}  # the job is done when the first rank of such a script is
    assert complaints(done.stderr) == []
