"""Jobs on a cluster of Ray's: `RayExecutor` runs functions as ranks, `UnidistTrainer` does it in Ray Train.

`executor/` has jobs with a fixed number of ranks, `elastic/` those whose ranks come and go, and `train` is all there is
for Ray Train. `placement` finds room for actors. `ray_logger` and `callbacks` bring values from ranks to the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_ray import ray_logger
    from unidist_ray.elastic import ElasticParams, RayHostDiscovery
    from unidist_ray.executor import ElasticRayExecutor, RayExecutor
    from unidist_ray.settings import RaySettings
    from unidist_ray.train import UnidistConfig, UnidistTrainer

__all__ = [
    "ElasticParams", "ElasticRayExecutor", "RayExecutor", "RayHostDiscovery", "RaySettings", "UnidistConfig",
    "UnidistTrainer", "ray_logger",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "": "ray_logger",
        "elastic": "ElasticParams RayHostDiscovery",
        "executor": "ElasticRayExecutor RayExecutor",
        "settings": "RaySettings",
        "train": "UnidistConfig UnidistTrainer",
    },
)
