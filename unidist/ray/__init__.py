"""The facade for Ray: `import unidist.ray`."""

try:
    from unidist_ray import (
        ElasticParams,
        ElasticRayExecutor,
        RayExecutor,
        RayHostDiscovery,
        RaySettings,
        UnidistConfig,
        UnidistTrainer,
        ray_logger,
    )
except ModuleNotFoundError as exc:
    if (exc.name or "").partition(".")[0] != "ray":
        raise
    raise ModuleNotFoundError("unidist.ray needs Ray: pip install 'unidist-train[ray]'", name=exc.name) from None

__all__ = [
    "ElasticParams", "ElasticRayExecutor", "RayExecutor", "RayHostDiscovery", "RaySettings", "UnidistConfig",
    "UnidistTrainer", "ray_logger",
]  # fmt: skip
