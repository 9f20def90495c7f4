"""Jobs whose ranks fail, join and leave: states that are committed and restored, and training through generations.

`state` has Horovod's names; `step_training` makes each step of a script's own loop a transaction; `batches` assigns
each sample of an epoch to exactly one rank.

Imports `elastic.peer`, `elastic.durable`, `checkpoint`, `runtime` and the folders below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.elastic.batches import BatchShare, Position, SampleOrder
    from unidist.elastic.divided_training import Divide, DividedTraining
    from unidist.elastic.generations import Generations, leaving_on_signals
    from unidist.elastic.handlers import (
        GeneratorsHandler,
        StatefulHandler,
        UpdateHandler,
        divided_handlers,
        update_handlers,
    )
    from unidist.elastic.notifications import HostUpdateResult, WorkerNotificationManager, notification_manager
    from unidist.elastic.rebinding import Rebindable, follow_generations
    from unidist.elastic.state import Handler, HostsUpdatedInterrupt, ObjectState, SharedHandler, State, run, run_fn
    from unidist.elastic.step_training import (
        Policy,
        Progress,
        Redistributable,
        StepTraining,
        passes_of_step,
        sample_place,
        training_of,
    )

__all__ = [
    "BatchShare", "Divide", "DividedTraining", "Generations", "GeneratorsHandler", "Handler", "HostUpdateResult",
    "HostsUpdatedInterrupt", "ObjectState", "Policy", "Position", "Progress", "Rebindable", "Redistributable",
    "SampleOrder", "SharedHandler", "State", "StatefulHandler", "StepTraining", "UpdateHandler",
    "WorkerNotificationManager", "divided_handlers", "follow_generations", "leaving_on_signals",
    "notification_manager", "passes_of_step", "run", "run_fn", "sample_place", "training_of", "update_handlers",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "batches": "BatchShare Position SampleOrder",
        "divided_training": "Divide DividedTraining",
        "generations": "Generations leaving_on_signals",
        "handlers": "GeneratorsHandler StatefulHandler UpdateHandler divided_handlers update_handlers",
        "notifications": "HostUpdateResult WorkerNotificationManager notification_manager",
        "rebinding": "Rebindable follow_generations",
        "state": "Handler HostsUpdatedInterrupt ObjectState SharedHandler State run run_fn",
        "step_training": "Policy Progress Redistributable StepTraining passes_of_step sample_place training_of",
    },
)
