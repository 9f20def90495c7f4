"""`unidist plugin new`: each kind, installed from its wheel, passes its own tests."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from unidist_command import Command

from unidist.errors import ConfigurationError
from unidist_launch.commands.plugin import KINDS, rendered

ROOT = Path(__file__).resolve().parents[4]


def run(words: list[str], folder: Path, *paths: Path) -> str:
    """Run a command; return what it prints."""
    path = os.pathsep.join(filter(None, [*map(str, paths), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=400,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parallel
@pytest.mark.parametrize("kind", KINDS)
def test_the_tests_of_a_new_plugin_pass_where_its_wheel_is_installed(
    command: Command, tmp_path: Path, kind: str
) -> None:
    if kind == "strategy":
        pytest.importorskip("torch")
    name = f"fresh-{kind}"
    made = command.run("plugin", "new", name, "--kind", kind)
    assert made.returncode == 0, made.stderr
    source, target = tmp_path / name, tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "wheels", str(source)], tmp_path)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], tmp_path)
    assert (target / f"fresh_{kind}" / "py.typed").is_file()
    path = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))
    # To check the sources of all that are installed takes seconds.
    others = {each.name for each in importlib.metadata.entry_points(group="unidist")} - {"core", "launch"}
    env = {"PYTHONPATH": path, "UNIDIST_DISABLE_PLUGINS": ",".join(sorted(others))}
    listed = command.run("plugins", "--check", "--json", env=env).stdout
    found = next(item for item in json.loads(listed)["plugins"] if item["distribution"] == name)
    assert (found["problems"], found["notes"]) == ([], [])
    printed = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"], source, target)
    assert " passed" in printed


@pytest.mark.parametrize("kind", KINDS)
def test_templates_leave_nothing_to_fill_in_and_are_formatted(tmp_path: Path, kind: str) -> None:
    files = rendered("my-plugin", kind)
    assert {"pyproject.toml", "README.md", "my_plugin/py.typed", "my_plugin/plugin.py", "tests/conftest.py"} <= {*files}
    for path, text in files.items():
        assert not re.search(r"@\w+@", path + text), path
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    pytest.importorskip("ruff")
    for words in (["format", "--check"], ["check", "--ignore", "D,I"]):
        config = ["--config", str(ROOT / "pyproject.toml")]
        run([sys.executable, "-m", "ruff", *words, *config, "--no-cache", str(tmp_path)], tmp_path)


@pytest.mark.parametrize(
    "name", ["My-Plugin", "my_plugin", "-x", "2fast", "a--b", "", "import", "unidist", "unidist-zero"]
)
def test_a_name_that_cannot_be_a_packages_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="name"):
        rendered(name, "events")


def test_what_is_there_is_not_overwritten(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    done = command.run("plugin", "new", "mine", "--kind", "events")
    assert done.returncode == 2
    assert "'mine' is there and not empty" in done.stderr
    assert command.run_here("plugin", "new", "mine", "--kind", "mice").returncode == 2
