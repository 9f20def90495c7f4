"""Registers the tracker `mlflow`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist_track import TrackerSpec


@hookimpl
def unidist_register_trackers(registry: Registry[TrackerSpec]) -> None:
    """Register it."""
    registry.add(
        TrackerSpec(
            "mlflow",
            "unidist_mlflow.tracker:Mlflow",
            "a run of MLflow, in a folder or on a server",
            module="mlflow",
            extra="unidist-train[mlflow]",
        )
    )
