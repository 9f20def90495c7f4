"""`unidist plugins`, with plugins of distributions that are made up on the spot."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from unidist_command import Command


def install(folder: Path, name: str, code: str) -> dict[str, str]:
    """Put a distribution with one plugin where the command finds it; returns the environment for that.

    In its own folder the command finds it anyway, ranks and other processes do not.
    """
    info = folder / f"dist_{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[unidist]\n{name} = plugin_{name}\n")
    (folder / f"plugin_{name}.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def alone() -> dict[str, str]:
    """Return a variable that switches off most of the plugins that are installed: to check their sources takes long."""
    installed = {each.name for each in importlib.metadata.entry_points(group="unidist")}
    return {"UNIDIST_DISABLE_PLUGINS": ",".join(sorted(installed - {"core", "launch"}))}


GOOD = """
from unidist import hookimpl
from unidist.engine import EngineSpec
from unidist_launch.command_spec import CommandSpec

@hookimpl
def unidist_register_engines(registry):
    registry.add(EngineSpec("carrier-pigeon", "nowhere:Pigeon", "slow"))

@hookimpl
def unidist_shutdown(context):
    pass

@hookimpl
def unidist_register_commands(registry):
    registry.add(CommandSpec("coo", "coo_command:coo", "Call."))
"""
COO = """
import click
coo = click.Command("coo", callback=lambda: click.echo("coo!") or 3)
"""
BAD = """
from unidist import hookimpl

@hookimpl
def unidist_register_engnes(registry):
    pass
"""


def listed(done: CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in json.loads(done.stdout)["plugins"]}


def test_each_plugin_is_listed_with_what_it_registers(command: Command, tmp_path: Path) -> None:
    install(tmp_path, "pigeon", GOOD)
    found = listed(command.run_here("plugins", "--json"))
    assert found["pigeon"] == {
        "name": "pigeon",
        "distribution": "dist-pigeon",
        "version": "1.5",
        "engines": ["carrier-pigeon"],
        "frameworks": [],
        "strategies": [],
        "bindings": [],
        "compressors": [],
        "schedules": [],
        "launchers": [],
        "facade_names": [],
        "commands": ["coo"],
        "command_options": [],
        "observers": [],
        "trackers": [],
        "file_names": [],
        "tensor_roles": [],
        "hooks": ["unidist_shutdown"],
        "problems": [],
    }
    assert found["core"]["engines"] == ["single", "shm"]
    assert found["launch"]["launchers"] == ["local", "elastic", "ssh"]


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
    done = command.run("plugins", "--json", env=env)
    assert done.returncode == 1
    found = listed(done)
    assert any(problem in text for text in found["broken"]["problems"])
    assert "launch" in found
    done = command.run("launch", "-np", "1", "true", env=env)
    assert done.returncode == 0


def test_a_name_that_two_plugins_register_is_a_problem_that_names_both(command: Command, tmp_path: Path) -> None:
    install(tmp_path, "broken", GOOD.replace('"carrier-pigeon"', '"shm"'))
    done = command.run_here("plugins", "--json")
    assert done.returncode == 1
    (problem,) = [text for item in listed(done).values() for text in item["problems"] if "engine 'shm'" in text]
    assert "'broken' (dist-broken)" in problem
    assert "'core' (unidist-train)" in problem


def test_a_disabled_plugin_is_not_loaded(command: Command, tmp_path: Path) -> None:
    install(tmp_path, "broken", BAD)
    done = command.run_here("plugins", "--json", env={"UNIDIST_DISABLE_PLUGINS": "broken"})
    assert "broken" not in {item["name"] for item in json.loads(done.stdout)["plugins"]}
    assert json.loads(done.stdout)["disabled"] == ["broken"]


def test_the_table_shows_names_and_problems(command: Command, tmp_path: Path) -> None:
    install(tmp_path, "broken", BAD)
    done = command.run_here("plugins", env={"COLUMNS": "200"})
    assert "dist-broken 1.5" in done.stdout
    assert "problem: implements hook 'unidist_register_engnes'" in done.stdout


@pytest.fixture
def coo(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "coo_command.py").write_text(COO)
    return install(tmp_path, "pigeon", GOOD)


def test_a_plugins_own_command_runs_and_its_code_counts(command: Command, coo: dict[str, str]) -> None:
    done = command.run("coo", env=coo)
    assert (done.returncode, done.stdout) == (3, "coo!\n")


def test_help_lists_a_plugins_command_without_importing_it(
    command: Command, tmp_path: Path, coo: dict[str, str]
) -> None:
    (tmp_path / "coo_command.py").write_text("raise SystemExit(0)")
    done = command.run("--help", env=coo)
    assert done.returncode == 0
    assert re.search(r"^  coo +Call\.$", done.stdout, re.MULTILINE)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("raise ValueError('no perch')", "ValueError: no perch"),
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("coo = 3", "'coo_command:coo' is a int, not a click.Command"),
    ],
)
def test_a_command_that_cannot_be_imported_is_an_error_that_says_why(
    command: Command, tmp_path: Path, coo: dict[str, str], code: str, reason: str
) -> None:
    (tmp_path / "coo_command.py").write_text(code)
    done = command.run("coo", env=coo)
    assert done.returncode == 2
    assert done.stderr.startswith("unidist: error: command 'coo'")
    assert reason in done.stderr


def test_plugins_cannot_take_a_command_of_the_house(command: Command, tmp_path: Path, coo: dict[str, str]) -> None:
    plugin = tmp_path / "plugin_pigeon.py"
    plugin.write_text(GOOD.replace('"coo"', '"doctor"').replace("carrier-", ""))
    done = command.run("doctor", "--json", env={**coo, "UNIDIST_DISABLE_PLUGINS": "torch"})  # which takes a second
    assert done.returncode == 0
    assert "coo!" not in done.stdout
    done = command.run_here("--help")
    assert "command 'doctor' of plugin 'pigeon' (dist-pigeon) is already registered by plugin 'launch'" in done.stderr


@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "raise KeyError('x')", "raise BaseException('stop')"])
@pytest.mark.parametrize("moment", ["import", "registration"])
def test_whatever_a_plugin_raises_is_a_warning_that_names_its_distribution(
    command: Command, tmp_path: Path, code: str, moment: str
) -> None:
    if moment == "registration":
        code = f"from unidist import hookimpl\n@hookimpl\ndef unidist_register_launchers(registry):\n    {code}\n"
    env = install(tmp_path, "broken", code)
    script = command.script("print('rank', rank)")
    done = command.run("launch", "-np", "1", script, env=env)
    assert (done.returncode, done.stdout) == (0, "[0] rank 0\n")
    assert "unidist: warning: plugin 'broken' of dist-broken 1.5: " in done.stderr
    done = command.run("--help", env=env)
    assert (done.returncode, "doctor" in done.stdout) == (0, True)
    if moment == "import":
        assert "unidist: warning: plugin 'broken' of dist-broken 1.5: cannot be imported" in done.stderr


PRIVATE = """
import unidist.runtime.context
from unidist import hookimpl
from unidist.registry import Registry, load_object
from unidist.runtime import PluginManager
from unidist_launch.observation.event_log import EventLog
from unidist_zero import _torch

def later():
    import unidist._shadow
    import unidist.torch as ud
"""


def test_private_names_are_notes_and_the_plugin_works(command: Command, tmp_path: Path) -> None:
    env = {**install(tmp_path, "curious", PRIVATE), **alone()}
    done = command.run("plugins", "--check", "--json", env=env)
    found = listed(done)
    assert found["curious"]["problems"] == []
    assert found["curious"]["notes"] == [
        f"plugin_curious.py:{line}: imports {name}, which is private: no __all__ lists it"
        for line, name in (
            (6, "unidist_launch.observation.event_log.EventLog"),
            (7, "unidist_zero._torch"),
            (10, "unidist._shadow"),
        )
    ]
    assert done.returncode == 0
    shown = command.run("plugins", "--check", env={**env, "COLUMNS": "200"}).stdout
    assert "note: plugin_curious.py:6: imports unidist_launch.observation.event_log.EventLog" in shown
    assert "notes" not in json.loads(command.run_here("plugins", "--json").stdout)["plugins"][0]


NOSY = """
import collections
from unidist.algorithms import PointToPointCommunicator
from unidist.engines import SingleCommunicator

class Mine(PointToPointCommunicator):
    def __init__(self, inner: SingleCommunicator) -> None:
        self._inner, self._aborted = inner, "mine, too"

    def abort(self, reason):
        if self._channel is not None:
            self._inner._ended = True
            print(self._aborted, self.channel, collections.namedtuple("a", "b")._fields)
        self._open_channel()
"""


def test_private_attributes_of_classes_that_a_plugin_imports_are_notes(command: Command, tmp_path: Path) -> None:
    env = {**install(tmp_path, "nosy", NOSY), **alone()}
    found = listed(command.run("plugins", "--check", "--json", env=env))["nosy"]["notes"]
    assert found == [
        f"plugin_nosy.py:{line}: uses {name}, which is private: an attribute of "
        "unidist.algorithms.point_to_point.PointToPointCommunicator"
        for line, name in ((11, "_channel"), (12, "_ended"), (14, "_open_channel"))
    ]


def test_a_plugin_that_keeps_to_public_names_has_no_note(command: Command, tmp_path: Path) -> None:
    env = {**install(tmp_path, "pigeon", GOOD), **alone()}
    assert listed(command.run("plugins", "--check", "--json", env=env))["pigeon"]["notes"] == []
