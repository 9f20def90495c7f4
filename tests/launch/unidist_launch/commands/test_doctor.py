"""`unidist doctor`."""

from __future__ import annotations

import json
from pathlib import Path

from unidist_command import Command

from unidist.framework import FrameworkSpec
from unidist_launch.commands.doctor import _without_native

WITHOUT_TORCH = {"UNIDIST_DISABLE_PLUGINS": "torch"}
"""For what has nothing to do with engines: to ask those of PyTorch takes a second."""


def test_json_tells_versions_machine_engines_and_environment(command: Command) -> None:
    variables = {"UNIDIST_TIMEOUT_SEC": "12", "HOROVOD_CYCLE_TIME": "3"}
    done = command.run("doctor", "--json", env={**variables, "HOROVOD_CONTROLLER": "gloo"})
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert facts["versions"]["python"].startswith("3.")
    assert facts["machine"]["cores"] >= 1
    assert facts["machine"]["memory_bytes"] > facts["machine"]["memory_available_bytes"] > 0
    assert facts["machine"]["memfd"] is True
    engines = {item["name"]: item for item in facts["engines"]}
    assert engines["single"]["usable"]
    assert {"name", "summary", "usable", "reason", "memory_kinds"} == set(engines["shm"])
    assert {item["name"]: item["usable"] for item in facts["launchers"]}["local"]
    assert facts["environment"] == variables
    assert facts["placement"] == {"source": "none", "rank": 0, "world_size": 1, "local_size": 1}


def test_the_table_names_engines_and_where_this_process_stands(command: Command) -> None:
    done = command.run("doctor")
    assert done.returncode == 0
    for text in ("engine shm", "launcher local", "no launcher: one process", "/dev/shm"):
        assert text in done.stdout


def test_inside_a_job_it_tells_the_place(command: Command) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    placement = json.loads(command.run("doctor", "--json", env={**env, **WITHOUT_TORCH}).stdout)["placement"]
    assert placement == {"source": "env://", "rank": 1, "world_size": 4, "local_size": 2}


def test_a_broken_environment_is_a_finding_and_not_an_end(command: Command) -> None:
    done = command.run("doctor", "--json", env={"UNIDIST_TIMEOUT_SEC": "soon", "RANK": "0"})
    assert done.returncode == 0
    problems = json.loads(done.stdout)["problems"]
    assert any("UNIDIST_TIMEOUT_SEC='soon' is not a number" in problem for problem in problems)
    assert any("WORLD_SIZE is not set" in problem for problem in problems)


def test_a_framework_of_a_version_that_was_not_tested_is_not_usable(command: Command, tmp_path: Path) -> None:
    (tmp_path / "jax.py").touch()
    (tmp_path / "jax-0.99.0.dist-info").mkdir()
    (tmp_path / "jax-0.99.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.99.0\n")
    facts = json.loads(command.run("doctor", "--json", env={"PYTHONPATH": str(tmp_path), **WITHOUT_TORCH}).stdout)
    [jax] = [item for item in facts["frameworks"] if item["name"] == "jax"]
    [xla] = [item for item in facts["engines"] if item["name"] == "xla"]
    for item in (jax, xla):
        assert not item["usable"]
        assert "0.99.0 is installed: pip install 'jax>=0.10," in item["reason"]


def test_what_is_slower_where_no_compiler_was_there() -> None:
    spec = FrameworkSpec("x", "", "", "", native=("unidist_tensorflow._missing", "steps are slower"))
    assert _without_native(spec) == (
        "; without unidist_tensorflow._missing, which needs a C compiler when unidist is built, steps are slower"
    )
    assert _without_native(FrameworkSpec("x", "", "", "", native=("json", ""))) == ""
    assert _without_native(FrameworkSpec("x", "", "", "")) == ""
