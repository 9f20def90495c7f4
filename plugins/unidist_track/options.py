"""The option `--track` of `unidist launch`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unidist.errors import ConfigurationError
from unidist.installation import install_command
from unidist_launch.display.grouped_help import GroupedOption

if TYPE_CHECKING:
    from unidist.registry import Registry
    from unidist.runtime import PluginManager
    from unidist_track.observer import TrackingObserver
    from unidist_track.tracker import TrackerSpec

OPTIONS = (
    GroupedOption(
        ["--track"],
        group="What is shown and kept",
        multiple=True,
        default=None,
        callback=lambda ctx, parameter, value: value or None,
        metavar="KIND:TARGET",
        help="Record loss, speed and recoveries of the job: csv:FILE, tensorboard:FOLDER, mlflow:FOLDER, wandb:FOLDER; "
        "more than once for several.",
    ),
)


def observer(options: Mapping[str, Any], is_elastic: bool, plugins: PluginManager) -> TrackingObserver | None:
    """Return what records a job; None if nothing is asked for.

    Raises:
        ConfigurationError: a tracker is not known or not installed, or has no target.
    """
    if not options["track"]:
        return None
    from unidist_track.observer import TrackingObserver
    from unidist_track.tracker import TrackerSpec

    registry = plugins.registry(TrackerSpec)
    return TrackingObserver([chosen(given, registry) for given in options["track"]], is_elastic=is_elastic)


def chosen(given: str, registry: Registry[TrackerSpec]) -> tuple[TrackerSpec, str]:
    """Return the tracker that a value of the option names, and its target.

    Raises:
        ConfigurationError: see `observer`.
    """
    name, _, target = given.partition(":")
    if not name or not target:
        raise ConfigurationError(f"--track {given}: write KIND:TARGET, such as csv:runs/1.csv")
    spec = registry.get(name)
    if spec.module and importlib.util.find_spec(spec.module) is None:
        raise ConfigurationError(
            f"--track {given}: the package {spec.module} is not installed. Install it: {install_command(spec.extra)}"
        )
    return spec, target
