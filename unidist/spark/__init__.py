"""The facade for Spark: `import unidist.spark`."""

try:
    from unidist_spark import (
        HorovodRunner,
        KerasEstimator,
        KerasModel,
        Store,
        TorchEstimator,
        TorchModel,
        run,
        run_elastic,
    )
except ModuleNotFoundError as exc:
    if (exc.name or "").partition(".")[0] not in ("pyspark", "pyarrow", "pandas", "fsspec"):
        raise
    raise ModuleNotFoundError(
        f"unidist.spark needs {exc.name}: pip install 'unidist-train[spark]'", name=exc.name
    ) from None

__all__ = [
    "HorovodRunner", "KerasEstimator", "KerasModel", "Store", "TorchEstimator", "TorchModel", "run", "run_elastic",
]  # fmt: skip
