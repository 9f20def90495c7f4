"""What CI tells a run of tests by its environment, with a real run of a few tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HELPERS = Path(__file__).parents[2] / "helpers"
TESTS = """
import pytest
def test_a(): pass
def test_b(): assert 1 == 2
@pytest.mark.parametrize("case", ["x y", "z"])
def test_c(case): pass
"""


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Run pytest on TESTS in two processes; returns its exit code and the report."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["run_control"]')
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = Path(sys.prefix).name

    def call(**lists: list[str] | str) -> tuple[int, dict[str, Any]]:
        outer = {name: value for name, value in os.environ.items() if not name.startswith("TEST_")}
        env = {**outer, "PYTHONPATH": str(HELPERS), "TEST_REPORT": str(tmp_path / "report")}
        for name, lines in lists.items():
            path = tmp_path / name
            text = "\n".join(lines).replace("HERE", environment) if isinstance(lines, list) else lines
            path.write_text(text)
            env[name] = text if name == "TEST_DEADLINE" else str(path)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n1", "--rootdir=.", "test_it.py"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
        line = ((tmp_path / "report").read_text().splitlines() or [done.stdout + done.stderr])[-1]
        return done.returncode, json.loads(line)

    return call


def test_a_report_has_what_passed_what_failed_and_why(run: Any) -> None:
    code, report = run()
    assert code == 1
    assert report["passed"] == ["test_it.py::test_a", "test_it.py::test_c[x y]", "test_it.py::test_c[z]"]
    assert list(report["failed"]) == ["test_it.py::test_b"]
    assert "assert 1 == 2" in report["failed"]["test_it.py::test_b"]
    assert report["environment"] == Path(sys.prefix).name


def test_lists_choose_files_of_this_environment(run: Any) -> None:
    code, report = run(TEST_ONLY=["HERE:test_it.py::test_c[x y]", "test_it.py::test_a"])
    assert (code, report["passed"]) == (0, ["test_it.py::test_a", "test_it.py::test_c[x y]"])


def test_a_file_stands_for_all_its_tests_and_what_is_left_out_is_left_out(run: Any) -> None:
    lists = {"TEST_ONLY": ["test_it.py"], "TEST_NOT": ["HERE:test_it.py::test_b", "other:test_it.py::test_a"]}
    code, report = run(**lists)
    assert (code, len(report["passed"]), report["failed"]) == (0, 3, {})


def test_nothing_of_a_list_is_no_error(run: Any) -> None:
    for lists in ({"TEST_ONLY": ["other:test_it.py::test_a"]}, {"TEST_NOT": ["test_it.py"]}):
        code, report = run(**lists)
        assert (code, report["passed"]) == (0, [])


def test_after_the_deadline_nothing_begins(run: Any) -> None:
    code, report = run(TEST_DEADLINE="1")
    assert (code, report["passed"], report["not_begun"]) == (0, [], 4)
