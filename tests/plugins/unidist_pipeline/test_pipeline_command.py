"""`unidist pipeline`, in this process; once as a user runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from unidist.errors import UnidistError
from unidist_pipeline.pipeline_command import pipeline
from unidist_pipeline.schedules.classic import one_forward_one_backward
from unidist_pipeline.schedules.files import read_schedule
from unidist_pipeline.schedules.model import PipelineSize


def run(*arguments: str) -> str:
    """Return what the command prints; an error of the command is raised."""
    result = CliRunner().invoke(pipeline, arguments, standalone_mode=False, env={"COLUMNS": "120"})
    if result.exception is not None:
        raise result.exception
    return result.output


def figures(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("show", "--json", *arguments))
    return found


ROOT = Path(__file__).resolve().parents[3]
SIZE = ("--stages", "4", "--microbatches", "8")


def test_as_a_user_runs_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unidist_launch", "pipeline", "show", "--schedule", "1f1b", *SIZE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "makespan 33, bubble 27.3%" in done.stdout.replace("\n", " ")
    assert "rank 3 " in done.stdout
    done = subprocess.run([*command, "--virtual", "0"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "stages_per_rank=0: it must be 1 or more" in done.stderr


def test_the_figures_are_those_of_the_formulas() -> None:
    assert figures("--schedule", "1f1b", *SIZE)["bubble_fraction"] == pytest.approx(3 / 11)
    found = figures("--schedule", "interleaved", *SIZE, "--virtual", "3")
    assert found["bubble_fraction"] == pytest.approx(3 / 27)
    assert (found["ranks"], found["stages"], found["microbatches"]) == (4, 12, 8)
    assert figures("--schedule", "interleaved", *SIZE)["stages"] == 8
    assert figures("--schedule", "gpipe", *SIZE)["peak_activations"] == [8, 8, 8, 8]


def test_every_cost_changes_the_figures() -> None:
    plain = figures("--schedule", "zb-h1", *SIZE)["makespan"]
    for option in ("--forward", "--backward", "--message", "--reduce"):
        assert figures("--schedule", "zb-h1", *SIZE, option, "5")["makespan"] > plain
    weights = figures("--schedule", "zb-h1", *SIZE, "--backward-weight", "0.5")
    assert weights["longest_bubble"] == 3 * (1 + 1.5 - 0.5)
    uneven = figures("--schedule", "1f1b", *SIZE, "--forward", "1,1,4,1")
    assert uneven["busy"] == [24, 24, 48, 24]
    waiting = ("--schedule", "1f1b", *SIZE, "--message", "1", "--waits")
    assert figures(*waiting, "rendezvous")["makespan"] > figures(*waiting, "asynchronous")["makespan"]


def test_a_schedule_is_written_drawn_and_read(tmp_path: Path) -> None:
    path, picture = tmp_path / "schedule.yaml", tmp_path / "chart.png"
    run("show", "--schedule", "1f1b", *SIZE, "--save", str(path), "--out", str(picture))
    assert read_schedule(path) == one_forward_one_backward(PipelineSize(4, 8))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert figures("--file", str(path))["makespan"] == 33


def test_schedules_are_listed_with_their_plugin() -> None:
    found = {row["name"]: row for row in json.loads(run("list", "--json"))}
    assert found["1f1b"]["plugin"] == "'pipeline' (unidist-train)"
    assert (found["1f1b"]["stages_per_rank"], found["zbv"]["stages_per_rank"]) == (1, 2)
    assert "zb-h1" in run("list")


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
    for option in pipeline.commands["show"].params:
        for name in option.opts:
            assert f"`{name}" in text, name


def test_the_table_of_schedules_in_the_documentation_is_true() -> None:
    text = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w-]+)` \|.*\| ([\d.]+ % \| [\d.]+) \|$", text, re.MULTILINE))
    for row in json.loads(run("list", "--json")):
        if row["plugin"].startswith("'pipeline'"):
            found = figures("--schedule", row["name"], "--stages", "8", "--microbatches", "32")
            held = max(found["peak_activations"]) / row["stages_per_rank"]
            assert rows[row["name"]] == f"{100 * found['bubble_fraction']:.1f} % | {held:g}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (SIZE, "either --schedule or --file"),
        (("--schedule", "1f1b", "--file", "x.yaml"), "either --schedule or --file"),
        (("--schedule", "1f1b", "--stages", "4"), "needs --stages and --microbatches"),
        (("--file", "x.yaml", "--stages", "4"), "has the sizes in it"),
        (("--schedule", "1f1b", *SIZE, "--forward", "1,x"), "'1,x' is not a number"),
        (("--schedule", "1f1b", *SIZE, "--forward", "1,2"), "forward has 2 numbers, but the pipeline 4 stages"),
        (("--schedule", "1f1b", *SIZE, "--message", "-1"), "message=-1: it must be 0 or more"),
        (("--schedule", "1f1b", *SIZE, "--virtual", "2"), "use the schedule interleaved"),
        (("--schedule", "zbw", *SIZE), "unknown schedule 'zbw'. Did you mean 'zbv'"),
    ],
)
def test_a_command_that_cannot_work_says_why(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises((click.UsageError, UnidistError), match=message):
        run("show", *arguments)
