"""`unidist plugins`, with plugins of distributions that are made up on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unidist_command import Command


def install(folder: Path, name: str, code: str) -> dict[str, str]:
    """Put a distribution with one plugin where the command finds it; returns the environment for that."""
    info = folder / f"dist_{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[unidist]\n{name} = plugin_{name}\n")
    (folder / f"plugin_{name}.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


GOOD = """
from unidist import hookimpl
from unidist.engine import EngineSpec

@hookimpl
def unidist_register_engines(registry):
    registry.add(EngineSpec("carrier-pigeon", "nowhere:Pigeon", "slow"))

@hookimpl
def unidist_shutdown(context):
    pass

@hookimpl
def unidist_add_commands(cli):
    import click
    cli.add_command(click.Command("coo", callback=lambda: click.echo("coo!") or 3))
"""
BAD = """
from unidist import hookimpl

@hookimpl
def unidist_register_engnes(registry):
    pass
"""


def listed(command: Command, env: dict[str, str]) -> tuple[int, dict[str, dict[str, object]]]:
    done = command.run("plugins", "--json", env=env)
    return done.returncode, {item["name"]: item for item in json.loads(done.stdout)["plugins"]}


def test_each_plugin_is_listed_with_what_it_registers(command: Command, tmp_path: Path) -> None:
    _, found = listed(command, install(tmp_path, "pigeon", GOOD))
    assert found["pigeon"] == {
        "name": "pigeon",
        "distribution": "dist-pigeon",
        "version": "1.5",
        "engines": ["carrier-pigeon"],
        "frameworks": [],
        "strategies": [],
        "compressors": [],
        "schedules": [],
        "launchers": [],
        "hooks": ["unidist_add_commands", "unidist_shutdown"],
        "problems": [],
    }
    assert found["core"]["engines"] == ["single", "shm"]
    assert found["launch"]["launchers"] == ["local", "elastic", "ssh", "mpi", "slurm", "kubernetes"]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (
            BAD,
            "implements hook 'unidist_register_engnes', which does not exist; did you mean 'unidist_register_engines'?",
        ),
        ("import no_such_thing", "No module named 'no_such_thing'"),
    ],
)
def test_a_plugin_with_a_problem_is_named_and_the_rest_works(
    command: Command, tmp_path: Path, code: str, problem: str
) -> None:
    env = install(tmp_path, "broken", code)
    status, found = listed(command, env)
    assert status == 1
    problems = found["broken"]["problems"]
    assert isinstance(problems, list)
    assert any(problem in text for text in problems)
    assert "launch" in found
    done = command.run("launch", "-np", "1", "true", env=env)
    assert done.returncode == 0


def test_a_name_that_two_plugins_register_is_a_problem_that_names_both(command: Command, tmp_path: Path) -> None:
    status, found = listed(command, install(tmp_path, "broken", GOOD.replace('"carrier-pigeon"', '"shm"')))
    assert status == 1
    (problem,) = [text for item in found.values() for text in item["problems"] if "engine 'shm'" in text]  # type: ignore[attr-defined]
    assert "'broken' (dist-broken)" in problem
    assert "'core' (unidist-train)" in problem


def test_a_disabled_plugin_is_not_loaded(command: Command, tmp_path: Path) -> None:
    env = {**install(tmp_path, "broken", BAD), "UNIDIST_DISABLE_PLUGINS": "broken"}
    done = command.run("plugins", "--json", env=env)
    assert "broken" not in {item["name"] for item in json.loads(done.stdout)["plugins"]}
    assert json.loads(done.stdout)["disabled"] == ["broken"]


def test_the_table_shows_names_and_problems(command: Command, tmp_path: Path) -> None:
    done = command.run("plugins", env={**install(tmp_path, "broken", BAD), "COLUMNS": "200"})
    assert "dist-broken 1.5" in done.stdout
    assert "problem: implements hook 'unidist_register_engnes'" in done.stdout


def test_a_plugins_own_command_runs_and_its_code_counts(command: Command, tmp_path: Path) -> None:
    env = install(tmp_path, "pigeon", GOOD)
    done = command.run("coo", env=env)
    assert (done.returncode, done.stdout) == (3, "coo!\n")
    assert "coo" in command.run("--help", env=env).stdout
