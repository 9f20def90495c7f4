"""Local SGD in elastic jobs: a change of the ranks ends the window, as the simulation in one process says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import local_sgd_elastic
from local_sgd_torch import Case

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize(
    "case",
    [
        Case(4, outer="nesterov", rate=0.7, optimizer="adamw", steps=local_sgd_elastic.STEPS),
        Case(4, fragments=2, delay=2, mix=0.25, optimizer="momentum", steps=local_sgd_elastic.STEPS),
    ],
    ids=["nesterov", "fragments"],
)
def test_a_lost_rank_and_one_that_joins_end_the_window(case: Case, tmp_path: Path) -> None:
    history, found = local_sgd_elastic.run(local_sgd_elastic.TORCH, tmp_path, case.line(), case.optimizer)
    assert history == [(0, 3), (6, 2), (13, 3)]
    expected = local_sgd_elastic.simulate(case, history)
    for parameters in found:
        assert parameters.keys() == expected.keys()
        for name, values in parameters.items():
            assert np.max(np.abs(np.array(values) - expected[name].ravel())) < 1e-12, name
    assert all(parameters == found[0] for parameters in found)


def test_by_the_flag_a_loop_of_the_script_goes_on_without_a_lost_rank(tmp_path: Path) -> None:
    line = "local_sgd=4:outer=nesterov:outer_lr=0.7"
    with local_sgd_elastic.start(local_sgd_elastic.BY_FLAG, tmp_path, line) as job:
        assert job.end(seconds=120) == 0, job.lines
    found = job.said(r"done (.*)")
    assert len(found) >= 2, job.lines
    assert len(set(found)) == 1


def test_keras_models_in_graphs_do_as_well(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    line = "local_sgd=4:outer=nesterov:outer_lr=0.7:outer_momentum=0.8"
    history, found = local_sgd_elastic.run(local_sgd_elastic.KERAS, tmp_path, line)
    assert history == [(0, 3), (6, 2), (13, 3)]
    expected = local_sgd_elastic.simulate_linear(history, every=4, rate=0.7, momentum=0.8)
    for parameters in found:
        assert np.max(np.abs(np.array(parameters["kernel"]) - expected.ravel())) < 1e-12
    assert all(parameters == found[0] for parameters in found)
