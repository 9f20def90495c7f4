"""Registers the tracker `tensorboard`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist_track import TrackerSpec


@hookimpl
def unidist_register_trackers(registry: Registry[TrackerSpec]) -> None:
    """Register it."""
    registry.add(
        TrackerSpec(
            "tensorboard",
            "unidist_tensorboard.tracker:TensorBoard",
            "event files for TensorBoard in a folder",
            module="tensorboardX",
            extra="unidist-train[tensorboard]",
        )
    )
