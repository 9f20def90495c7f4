"""Figures of machines, corrected by measured runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from planning_plugins import A100, predicted, problem

from unidist.cost_model.cluster import Cluster
from unidist.cost_model.efficiency import Efficiency
from unidist.errors import ConfigurationError
from unidist_planner.memory.transformer import Transformer
from unidist_planner.step_time.fit import MeasuredRun, fitted, read_runs
from unidist_planner.step_time.transformer import TransformerWork

WORK = TransformerWork(Transformer(12, 1024, 8000, 512, heads=16), batch=64, precision="fp16")
GIVEN = replace(A100, overlap=0.0)
LINES = ("", "zero=2", "tensor=8", "accumulate=4,activations=recompute")


def measured(cluster: Cluster, *lines: str, ranks: int = 16) -> list[MeasuredRun]:
    """Runs on machines as `cluster` describes them."""
    return [
        MeasuredRun(line, ranks, 64, predicted(line, problem(WORK, ranks, cluster=cluster)).seconds) for line in lines
    ]


def test_one_run_tells_how_fast_ranks_compute() -> None:
    slow = replace(
        GIVEN, flops=125e12, attention_flops=62.5e12, memory_bandwidth=1e12, product_overhead=16e-6, overlap=1.0
    )
    given = replace(GIVEN, overlap=1.0)
    fit = fitted(measured(slow, "accumulate=4"), problem(WORK, 16, cluster=given))
    assert fit.speed == pytest.approx(0.5, rel=0.01)
    assert fit.links == 1.0
    assert fit.after == pytest.approx([run.seconds for run in fit.runs], rel=0.005)
    assert fit.before[0] < 0.7 * fit.after[0]


def test_several_runs_tell_what_links_reach_too() -> None:
    other = replace(
        GIVEN,
        flops=200e12,
        attention_flops=100e12,
        memory_bandwidth=1.6e12,
        product_overhead=10e-6,
        efficiency_inside=Efficiency.constant(0.6),
        efficiency_between=Efficiency.constant(0.6 * 0.34),
    )
    fit = fitted(measured(other, *LINES), problem(WORK, 16, cluster=GIVEN))
    assert fit.speed == pytest.approx(0.8, rel=0.02)
    assert fit.links == pytest.approx(0.6, rel=0.02)
    unseen = "zero=3"
    expected, corrected, plain = (
        predicted(unseen, problem(WORK, 16, cluster=cluster)).seconds for cluster in (other, fit.cluster, GIVEN)
    )
    assert corrected == pytest.approx(expected, rel=0.01)
    assert abs(plain / expected - 1) > 0.2


def test_runs_that_no_correction_reaches_are_shown_as_they_are() -> None:
    runs = [
        replace(run, seconds=run.seconds * factor)
        for run, factor in zip(measured(GIVEN, "", "zero=2"), (1, 3), strict=True)
    ]
    fit = fitted(runs, problem(WORK, 16, cluster=GIVEN))
    assert max(abs(after / run.seconds - 1) for after, run in zip(fit.after, runs, strict=True)) > 0.3
    assert "measured" in fit.lines()[1]
    assert [run["strategy"] for run in fit.described()["runs"]] == ["", "zero=2"]


def track(path: Path, seconds: float) -> None:
    """A file of --track csv: the first steps take longer."""
    times = [(1, 100.0), (2, 130.0), *((step, 130.0 + seconds * (step - 2)) for step in (10, 20, 35))]
    path.write_text("step,time,name,value\n" + "".join(f"{s},{t:.3f},loss,0.5\n{s},{t:.3f},lr,1\n" for s, t in times))


def test_runs_are_read_with_the_steps_of_their_tracks(tmp_path: Path) -> None:
    track(tmp_path / "one.csv", 0.25)
    path = tmp_path / "runs.json"
    path.write_text(
        json.dumps([{"ranks": 8, "track": "one.csv"}, {"strategy": "zero=2", "ranks": 4, "batch": 32, "seconds": 2}])
    )
    assert read_runs(path, 64) == (MeasuredRun("", 8, 64, pytest.approx(0.25)), MeasuredRun("zero=2", 4, 32, 2.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "is no JSON"),
        ("[]", "give a list of runs"),
        ('[{"ranks": 2}]', 'run 1: give either "seconds"'),
        ('[{"ranks": 2, "seconds": 1}, {"seconds": 1}]', "run 2: how many ranks"),
        ('[{"ranks": 2, "seconds": 0}]', "a step of 0 seconds"),
        ('[{"ranks": 2, "second": 1}]', "an object with batch, ranks"),
        ('[{"ranks": 2, "track": "gone.csv"}]', "gone.csv cannot be read"),
        ('[{"ranks": 2, "track": "runs.json"}]', "no file of --track|points of 0 steps"),
    ],
)
def test_what_is_wrong_with_runs_is_said(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "runs.json").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_runs(tmp_path / "runs.json", 64)
