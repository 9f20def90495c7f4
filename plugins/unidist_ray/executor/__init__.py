"""`RayExecutor`: ranks that are actors of Ray's.

`executor` is what users see, `elastic_executor` a narrower class of Horovod's. `fixed_job` runs the calls of a job
whose ranks stay the same, and `rank_actor` is the actor of a rank. Imports `elastic` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_ray.executor.elastic_executor import ElasticRayExecutor
    from unidist_ray.executor.executor import RayExecutor

__all__ = ["ElasticRayExecutor", "RayExecutor"]

__getattr__ = lazy_names(__name__, {"elastic_executor": "ElasticRayExecutor", "executor": "RayExecutor"})
