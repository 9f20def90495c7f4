"""The benchmark of the control plane, with a few workers: real launchers, agents and connections."""

from __future__ import annotations

import pytest

from benchmarks.control_plane.growth import KINDS, measure, tables


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_of_simulated_workers_forms_loses_workers_and_says_what_it_cost(kind: str) -> None:
    figures = measure(kind, 24, steady_sec=1.2)
    assert 0 < figures.hosts_joined <= figures.met < 60
    assert 0 < figures.noticed < 60
    assert figures.form_cpu > 0
    assert figures.worker_form_cpu > 0
    if kind == "elastic":
        assert figures.formed <= figures.met
        assert figures.noticed <= figures.reformed <= figures.whole
        assert figures.crowd == 8  # of two simulators, one has two hosts, and one has one
        assert 0 < figures.crowd_noticed <= figures.crowd_reformed
        assert 0 < figures.beats < 1.5
    else:
        assert figures.exchanged > 0
    (table,) = tables({kind: {24: figures}})
    assert table.row_count > 8


@pytest.mark.soak
def test_a_loss_of_many_hosts_takes_no_longer_than_one_of_a_worker() -> None:
    """Work for each lost worker that grows with the job once took the launcher a minute here."""
    figures = measure("elastic", 2000, steady_sec=1.0)
    assert figures.crowd == 496
    assert figures.crowd_reformed < 3 * figures.reformed
