"""Registers the tracker `wandb`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist_track import TrackerSpec


@hookimpl
def unidist_register_trackers(registry: Registry[TrackerSpec]) -> None:
    """Register it."""
    registry.add(
        TrackerSpec(
            "wandb",
            "unidist_wandb.tracker:WeightsAndBiases",
            "a run of Weights & Biases in a folder, offline unless WANDB_MODE says otherwise",
            module="wandb",
            extra="unidist-train[wandb]",
        )
    )
