"""The facade for Spark: `import unidist.spark`."""

from unidist.installation import install_command

try:
    from unidist_spark import (
        Backend,
        HorovodRunner,
        KerasEstimator,
        KerasModel,
        SparkBackend,
        Store,
        TorchEstimator,
        TorchModel,
        default_num_proc,
        get_available_devices,
        run,
        run_elastic,
    )
except ModuleNotFoundError as exc:
    if (exc.name or "").partition(".")[0] not in ("pyspark", "pyarrow", "pandas", "fsspec"):
        raise
    raise ModuleNotFoundError(
        f"unidist.spark needs {exc.name}: {install_command('unidist-train[spark]')}", name=exc.name
    ) from None

__all__ = [
    "Backend", "HorovodRunner", "KerasEstimator", "KerasModel", "SparkBackend", "Store", "TorchEstimator", "TorchModel",
    "default_num_proc", "get_available_devices", "run", "run_elastic",
]  # fmt: skip
