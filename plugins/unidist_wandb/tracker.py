"""A run of Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping

import wandb
from typing_extensions import override

from unidist_track import TrackedJob, Tracker


class WeightsAndBiases(Tracker):
    """Makes a run in the project that `WANDB_PROJECT` names, or in one named after the script.

    Args:
        target: the folder for its files.
        job: that is recorded.
    """

    def __init__(self, target: str, job: TrackedJob) -> None:
        os.makedirs(target, exist_ok=True)  # else wandb takes the temporary folder
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", job.title),
            dir=target,
            mode=os.environ.get("WANDB_MODE", "offline"),
            config={"command": " ".join(job.command), "num_proc": job.num_proc},
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")  # an elastic job may repeat steps, which wandb's own refuses

    @override
    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step, "time": time})

    @override
    def close(self, exit_code: int | None) -> None:
        self._run.finish(exit_code=1 if exit_code is None else exit_code)
