"""The option `--evaluator` of `unidist launch`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unidist.errors import ConfigurationError
from unidist_launch.display.grouped_help import GroupedOption
from unidist_launch.options import command_line
from unidist_launch.options.numbers import Whole

if TYPE_CHECKING:
    from unidist.runtime import PluginManager
    from unidist_evaluator.observer import EvaluatingObserver

OPTIONS = (
    GroupedOption(
        ["--evaluator"],
        group="What is shown and kept",
        default=None,
        metavar="COMMAND",
        help='Start one more process, which evaluates each finished checkpoint: "evaluate.py --data folder".',
    ),
    GroupedOption(
        ["--evaluator-host"],
        group="What is shown and kept",
        type=Whole(min=0),
        default=None,
        metavar="N",
        help="The host of the job on which it runs, counted from 0. Default: the first.",
    ),
)


def observer(options: Mapping[str, Any], is_elastic: bool, plugins: PluginManager) -> EvaluatingObserver | None:
    """Return what starts the evaluator; None if none is asked for.

    Raises:
        ConfigurationError: the command cannot be found.
    """
    given, host = options["evaluator"], options["evaluator_host"]
    if given is None:
        if host is not None:
            raise ConfigurationError("--evaluator-host says where --evaluator runs; give that, too")
        return None
    try:
        words = shlex.split(given)
        command = command_line.resolve(words, module=False, environ=os.environ)
    except (ValueError, ConfigurationError) as exc:
        raise ConfigurationError(f"--evaluator {given!r}: {exc}") from exc
    from unidist_evaluator.observer import EvaluatingObserver

    return EvaluatingObserver(command, host=host or 0)
