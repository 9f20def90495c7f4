"""Registers `--track`, lets plugins register trackers, and registers the tracker `csv`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist import hookimpl
from unidist.registry import Registry
from unidist_launch.observers import ObserverSpec
from unidist_track import tracker
from unidist_track.tracker import TrackerSpec

if TYPE_CHECKING:
    from unidist.runtime import PluginManager


@hookimpl
def unidist_add_kinds(manager: PluginManager) -> None:
    """Let plugins register trackers."""
    manager.add_kind(TrackerSpec, tracker)


@hookimpl
def unidist_register_observers(registry: Registry[ObserverSpec]) -> None:
    """Register what feeds the trackers, with its option."""
    from unidist_track.options import OPTIONS

    registry.add(ObserverSpec("track", "unidist_track.options:observer", "records a job with trackers", OPTIONS))


@hookimpl
def unidist_register_trackers(registry: Registry[TrackerSpec]) -> None:
    """Register the file of comma-separated values."""
    registry.add(TrackerSpec("csv", "unidist_track.csv_file:CsvFile", "a file of comma-separated values"))
