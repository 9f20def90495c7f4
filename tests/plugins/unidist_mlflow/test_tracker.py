"""Runs of MLflow, read back by its client."""

from __future__ import annotations

import pytest
from tracked_jobs import LAST_LOSSES, NAMES, NUM_STEPS, SCRIPT
from unidist_command import Command

pytest.importorskip("mlflow", reason="needs MLflow: make test-integrations")
pytestmark = pytest.mark.parallel


@pytest.mark.parametrize(("code", "status"), [("", "FINISHED"), ("sys.exit(3)", "FAILED")])
def test_a_job_becomes_a_run(command: Command, monkeypatch: pytest.MonkeyPatch, code: str, status: str) -> None:
    from mlflow import MlflowClient

    ended = command.run("launch", "-np", "2", "--track", "mlflow:runs", command.script(SCRIPT + code))
    assert ended.returncode == (3 if code else 0), ended.stderr
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=str(command.folder / "runs"))
    experiment = client.get_experiment_by_name("script.py")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == status
    assert set(run.data.metrics) == NAMES
    assert run.data.params["num_proc"] == "2"
    last = client.get_metric_history(run.info.run_id, "loss")[-1]
    assert last.step == NUM_STEPS
    assert LAST_LOSSES[0] <= last.value <= LAST_LOSSES[1]
