"""Reports of runs, and second tries of tests that failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.ci import runs
from tools.ci.runs import Outcome, again, flakes, read_report


def report(path: Path, *lines: dict[str, object]) -> Path:
    usual = {"environment": ".venv", "passed": [], "failed": {}, "not_begun": 0, "exit_status": 0}
    path.write_text("".join(json.dumps({**usual, **line}) + "\n" for line in lines))
    return path


def test_a_report_of_several_runs_is_one_outcome(tmp_path: Path) -> None:
    path = report(
        tmp_path / "report",
        {"passed": ["a", "b"], "failed": {"c": "assert 0"}, "exit_status": 1},
        {"environment": ".venv-jax", "passed": ["a"], "not_begun": 3},
    )
    found = read_report(path, 2)
    assert found == Outcome({".venv:a", ".venv:b", ".venv-jax:a"}, {".venv:c": "assert 0"}, 3)
    assert not found.is_good


def test_a_run_that_fails_without_a_failed_test_is_broken(tmp_path: Path) -> None:
    assert read_report(tmp_path / "none", 2).broken
    assert read_report(report(tmp_path / "report", {"exit_status": 3}), 2).broken
    assert read_report(report(tmp_path / "report", {"passed": ["a"]}, {"exit_status": 5}), 0).is_good


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Outcome:
    """What the second run comes to."""
    outcome = Outcome()
    monkeypatch.setattr(runs, "FLAKES", tmp_path / "flakes.jsonl")
    monkeypatch.setattr(runs, "run", lambda target, only: outcome)
    return outcome


def test_what_passes_at_the_second_try_is_recorded_as_a_flake(second: Outcome) -> None:
    second.passed.add(".venv:b")
    found = again("test", Outcome({".venv:a"}, {".venv:b": "assert 1 == 2"}))
    assert found == Outcome({".venv:a", ".venv:b"})
    [flake] = flakes()
    assert flake.startswith(".venv:b (20")
    assert flake.endswith("): assert 1 == 2")


def test_what_fails_twice_has_failed(second: Outcome) -> None:
    second.failed[".venv:b"] = "assert 0"
    assert again("test", Outcome(failed={".venv:b": "assert 0"})).failed == {".venv:b": "assert 0"}
    assert flakes() == []


def test_what_the_second_run_never_reached_has_failed(second: Outcome) -> None:
    assert again("test", Outcome(failed={".venv:b": "assert 0"})).failed == {".venv:b": "assert 0"}
    second.broken = True
    assert again("test", Outcome(failed={".venv:b": "assert 0"})).broken


def test_many_failures_are_not_tried_again(second: Outcome) -> None:
    failed = {f".venv:{number}": "" for number in range(runs.MOST_FAILED + 1)}
    second.passed.update(failed)
    assert again("test", Outcome(failed=dict(failed))).failed == failed


def test_an_outcome_is_told_in_a_line() -> None:
    assert str(Outcome({"a", "b"})) == "green, 2 passed"
    assert str(Outcome({"a"}, {"b": "assert 0"}, 3)) == "1 failed, 1 passed, 3 NOT BEGUN in time"
    assert str(Outcome(broken=True)) == "broken, 0 passed"
    assert str(Outcome(left_out=True)) == "LEFT OUT, there was no time"
