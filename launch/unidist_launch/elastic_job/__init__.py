"""A job whose ranks come and go, as its launcher sees it.

`ElasticRun` is the loop. The coordinator, in the control server's thread, decides who is in the world; the folder's
other modules find hosts, start workers on them, judge how they end, keep the state for another launcher, and tell
observers. Imports `agent`, `observation`, `options`, `output`, `remote` and
`side_processes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_launch.elastic_job.discovery import HostSource
    from unidist_launch.elastic_job.fallback import run_elastic
    from unidist_launch.elastic_job.report import event_line
    from unidist_launch.elastic_job.run import ElasticRun

__all__ = [
    "ElasticRun", "HostSource", "event_line", "run_elastic",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "discovery": "HostSource",
        "fallback": "run_elastic",
        "report": "event_line",
        "run": "ElasticRun",
    },
)
