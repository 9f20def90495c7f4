"""Event files for TensorBoard, written by tensorboardX, which needs no framework."""

from __future__ import annotations

from collections.abc import Mapping

from tensorboardX import SummaryWriter
from typing_extensions import override

from unidist_track import TrackedJob, Tracker


class TensorBoard(Tracker):
    """Writes a scalar for each value, and the command as text.

    Args:
        target: the run's folder.
        job: that is recorded.
    """

    def __init__(self, target: str, job: TrackedJob) -> None:
        self._writer = SummaryWriter(target)
        self._writer.add_text("command", " ".join(job.command), 0)

    @override
    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    @override
    def close(self, exit_code: int | None) -> None:
        self._writer.close()
