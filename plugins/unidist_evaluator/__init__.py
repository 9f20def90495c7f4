"""The evaluator of a job: a process beside the ranks that evaluates each finished checkpoint.

`unidist launch --evaluator "evaluate.py"` starts it (`observer`), on one of the job's hosts. Its script asks for
`evaluations(folder)`. What it reports goes to the launcher by values that the job shares (`link`), and from there as
the event `evaluated` to the status page and the trackers.
`series` finds the checkpoints, and keeps them until they are evaluated. No framework is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_evaluator.evaluation import Evaluation, evaluations
    from unidist_evaluator.series import CheckpointSeries, FinishedCheckpoint

__all__ = [
    "CheckpointSeries", "Evaluation", "FinishedCheckpoint", "evaluations",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "evaluation": "Evaluation evaluations",
        "series": "CheckpointSeries FinishedCheckpoint",
    },
)
