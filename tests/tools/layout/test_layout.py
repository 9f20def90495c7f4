"""All rules on this project, and what the command answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.layout.__main__ import RULES
from tools.layout.project import Project, read_project

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def project() -> Project:
    return read_project(ROOT)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_this_project_satisfies(project: Project, rule: str) -> None:
    assert RULES[rule](project) == []


def test_the_sources_were_read(project: Project) -> None:
    assert len(project.modules) > 400
    assert {"unidist", "unidist_torch", "unidist_zero", "unidist_launch"} <= project.packages
    assert "unidist_zero.plugin" in project.entry_modules


def test_the_command_says_that_all_is_well() -> None:
    command = [sys.executable, "-m", "tools.layout"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("layout: imports run down")


def test_the_command_prints_violations_and_fails(tmp_path: Path) -> None:
    (tmp_path / "unidist").mkdir()
    for name in ("__init__", *(f"m{number}" for number in range(21))):
        (tmp_path / "unidist" / f"{name}.py").touch()
    command = [sys.executable, "-m", "tools.layout", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == "unidist/__init__.py:1: 21 modules in one folder, at most 20 [sizes]\n"
