"""Lines through measured times, and the file that a plan is made from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from unidist.cost_model.collectives import cost
from unidist.errors import ConfigurationError
from unidist_planner.step_time.measurements import Line, Measurements, fitted, read, write

FOUND = Measurements("here", 4, "shm", "float32", 5e10, 8e9, 4e9, Line(20e-6, 2e-10), Line(60e-6, 3e-10))


def test_a_line_goes_through_points_that_lie_on_one() -> None:
    line = fitted([(size, 5e-6 + size * 2e-10) for size in (8, 1 << 10, 1 << 16, 1 << 24)])
    assert line.fixed == pytest.approx(5e-6)
    assert line.each == pytest.approx(2e-10)


def test_large_messages_do_not_drown_the_latency_of_small_ones() -> None:
    """Ten percent more for the largest message moves a line with least squares of seconds by far; ours stays near."""
    points = [(size, 5e-6 + size * 2e-10) for size in (8, 64, 512, 1 << 16, 1 << 24)]
    size, seconds = points[-1]
    line = fitted([*points[:-1], (size, 1.1 * seconds)])
    assert line.fixed == pytest.approx(5e-6, rel=0.1)


def test_numbers_never_become_negative() -> None:
    assert fitted([(1e6, 1e-3), (2e6, 2.5e-3)]).fixed == 0.0
    flat = fitted([(8, 2e-3), (1e6, 1e-3)])
    assert flat.each == 0.0
    assert 1e-3 <= flat.fixed <= 2e-3


@pytest.mark.parametrize("points", [[], [(8, 1e-6)], [(8, 1e-6), (8, 2e-6)], [(8, 1e-6), (9, 0.0)]])
def test_too_few_points_are_an_error(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ConfigurationError, match="give no line"):
        fitted(points)


def test_a_ring_on_the_fitted_link_takes_as_long_as_was_measured() -> None:
    ring, link = cost("allreduce", "ring", 4), FOUND.collectives
    for size in (0.0, 1e6, 1e9):
        assert ring.seconds(size, link) == pytest.approx(60e-6 + size * 3e-10)
    assert FOUND.messages.latency == 20e-6
    assert FOUND.messages.bandwidth == pytest.approx(5e9)


def test_a_time_that_does_not_grow_is_a_link_without_limit() -> None:
    assert replace(FOUND, message=Line(1e-5, 0.0)).messages.bandwidth == float("inf")


def test_a_file_holds_everything(tmp_path: Path) -> None:
    write(FOUND, tmp_path / "here.json")
    assert read(tmp_path / "here.json") == FOUND


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.json cannot be read.*doctor --measure"):
        read(tmp_path / "none.json")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "another"}', '{"format": "unidist measurements 1"}'],
)
def test_another_file_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"other\.json holds no measurements"):
        read(tmp_path / "other.json")


@pytest.mark.parametrize(("name", "value"), [("flops", 0), ("memory_bytes", -1), ("num_ranks", 1)])
def test_numbers_that_cannot_be_are_an_error(name: str, value: float, tmp_path: Path) -> None:
    write(FOUND, tmp_path / "here.json")
    changed = json.loads((tmp_path / "here.json").read_text()) | {name: value}
    (tmp_path / "here.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigurationError, match=r"measurements (with|of)"):
        read(tmp_path / "here.json")
