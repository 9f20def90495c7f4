"""The settings of a process: what the user chose, and which place a launcher gave it; read from the environment once.

Imports the root only. Nothing else in unidist reads environment variables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.settings.devices import (
        device_index,
        installed_devices,
        num_visible,
        ranks_may_share,
        visible_devices,
    )
    from unidist.settings.environment import (
        HOROVOD_VARIABLES,
        LOG_LEVELS,
        MAX_CACHE_CAPACITY,
        ROLE_VARIABLE,
        VARIABLES,
        Settings,
        configure_logging,
        set_variables,
    )
    from unidist.settings.placement import Placement, ignored_tasks, job_secret, read_placement, values_place
    from unidist.settings.rank_process import RankProcess, announce_rank_process
    from unidist.settings.worker_place import WorkerPlace

__all__ = [
    "HOROVOD_VARIABLES", "LOG_LEVELS", "MAX_CACHE_CAPACITY", "Placement", "ROLE_VARIABLE", "RankProcess", "Settings",
    "VARIABLES", "WorkerPlace", "announce_rank_process", "configure_logging", "device_index", "ignored_tasks",
    "installed_devices", "job_secret", "num_visible", "ranks_may_share", "read_placement", "set_variables",
    "values_place", "visible_devices",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "devices": "device_index installed_devices num_visible ranks_may_share visible_devices",
        "environment": (
            "HOROVOD_VARIABLES LOG_LEVELS MAX_CACHE_CAPACITY ROLE_VARIABLE Settings VARIABLES configure_logging "
            "set_variables"
        ),
        "placement": "Placement ignored_tasks job_secret read_placement values_place",
        "rank_process": "RankProcess announce_rank_process",
        "worker_place": "WorkerPlace",
    },
)
