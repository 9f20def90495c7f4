"""A run of MLflow."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from typing_extensions import override

from unidist_track import TrackedJob, Tracker

_MAX_PARAMETER = 6000  # characters, MLflow's limit for the value of a parameter


class Mlflow(Tracker):
    """Makes a run in the experiment that `MLFLOW_EXPERIMENT_NAME` names, or in one named after the script.

    Args:
        target: a tracking URI (`http://server:5000`, `sqlite:///runs.db`), or a folder for MLflow's files.
        job: that is recorded.
    """

    def __init__(self, target: str, job: TrackedJob) -> None:
        if "://" not in target:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else MLflow refuses folders, as of version 3.7
        self._client = MlflowClient(tracking_uri=target)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", job.title)
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        self._run = self._client.create_run(number, run_name=job.title).info.run_id
        parameters = {"command": " ".join(job.command)[:_MAX_PARAMETER], "num_proc": str(job.num_proc)}
        self._client.log_batch(self._run, params=[Param(name, value) for name, value in parameters.items()])

    @override
    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        milliseconds = int(time * 1000)
        self._client.log_batch(
            self._run, metrics=[Metric(name, value, milliseconds, step) for name, value in values.items()]
        )

    @override
    def close(self, exit_code: int | None) -> None:
        self._client.set_terminated(self._run, "FINISHED" if exit_code == 0 else "FAILED")
