"""The options `--data-workers` and `--data-key-file` of `unidist launch`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidist.errors import ConfigurationError
from unidist_launch.display.grouped_help import GroupedOption
from unidist_launch.options.numbers import Whole

if TYPE_CHECKING:
    from unidist.runtime import PluginManager
    from unidist_data_service.observer import DataWorkersObserver

_GROUP = "How training is spread"

OPTIONS = (
    GroupedOption(
        ["--data-workers"],
        group=_GROUP,
        default=None,
        type=Whole(min=1),
        metavar="N",
        help="Start N more processes, spread over the hosts, that read data for `ud.data_service()`.",
    ),
    GroupedOption(
        ["--data-key-file"],
        group=_GROUP,
        default=None,
        metavar="FILE",
        help="Write the key by which `unidist data-worker --join` adds data workers to this file, and say how.",
    ),
)


def observer(options: Mapping[str, Any], is_elastic: bool, plugins: PluginManager) -> DataWorkersObserver | None:
    """Return what starts the data workers; None if none are asked for.

    Raises:
        ConfigurationError: the job cannot have them.
    """
    count, key_file = options["data_workers"], options["data_key_file"]
    if count is None:
        if key_file is not None:
            raise ConfigurationError("--data-key-file is for data workers that join a job: give --data-workers, too")
        return None
    if is_elastic:
        raise ConfigurationError(
            "--data-workers: batches that were read ahead would be for ranks that are gone, in an elastic job; give "
            "each rank's DataLoader num_workers= instead"
        )
    from unidist_data_service.observer import DataWorkersObserver

    return DataWorkersObserver(count, key_file=None if key_file is None else Path(key_file).absolute())
