"""Elastic jobs on Ray: nodes and ranks may come and go while the job runs.

`discovery` asks Ray which nodes there are (`changing_hosts` as if they came and went), `agents` has an actor on each
run the agent of unidist's launcher, and `job` is an actor, too, in which that launcher runs. `logged` brings what ranks
log to the node's actor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_ray.elastic.discovery import RayHostDiscovery
    from unidist_ray.elastic.job import ElasticParams, run_elastic
    from unidist_ray.elastic.logged import with_files

__all__ = ["ElasticParams", "RayHostDiscovery", "run_elastic", "with_files"]

__getattr__ = lazy_names(
    __name__, {"discovery": "RayHostDiscovery", "job": "ElasticParams run_elastic", "logged": "with_files"}
)
