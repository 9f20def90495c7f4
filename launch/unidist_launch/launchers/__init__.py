"""The launchers that need no scheduler: on this host (`local`), by ssh (`ssh`), and of elastic jobs (`elastic`).

Each is a thin class over the folder that does the work; `run_processes` is the loop of `local`, for any launcher whose
ranks are processes of this host. Imports `elastic_job`, `observation`, `options`, `output`, `remote` and
`side_processes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_launch.launchers.rank_processes import RankProcesses, run_processes

__all__ = ["RankProcesses", "run_processes"]

__getattr__ = lazy_names(__name__, {"rank_processes": "RankProcesses run_processes"})
