"""The facade for Ray: `import unidist.ray`."""

from unidist.installation import install_command

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
    raise ModuleNotFoundError(
        f"unidist.ray needs Ray: {install_command('unidist-train[ray]')}", name=exc.name
    ) from None

__all__ = [
    "ElasticParams", "ElasticRayExecutor", "RayExecutor", "RayHostDiscovery", "RaySettings", "UnidistConfig",
    "UnidistTrainer", "ray_logger",
]  # fmt: skip
