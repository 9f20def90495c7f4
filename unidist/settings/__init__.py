"""The settings of a process: what the user chose, and which place a launcher gave it; read from the environment once.

Imports the root only. Nothing else in unidist reads environment variables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.settings.environment import (
        HOROVOD_VARIABLES,
        LOG_LEVELS,
        MAX_CACHE_CAPACITY,
        VARIABLES,
        Settings,
        configure_logging,
        set_variables,
    )
    from unidist.settings.placement import Placement, read_placement
    from unidist.settings.worker_place import WorkerPlace

__all__ = [
    "HOROVOD_VARIABLES", "LOG_LEVELS", "MAX_CACHE_CAPACITY", "Placement", "Settings", "VARIABLES", "WorkerPlace",
    "configure_logging", "read_placement", "set_variables",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "environment": (
            "HOROVOD_VARIABLES LOG_LEVELS MAX_CACHE_CAPACITY Settings VARIABLES configure_logging set_variables"
        ),
        "placement": "Placement read_placement",
        "worker_place": "WorkerPlace",
    },
)
