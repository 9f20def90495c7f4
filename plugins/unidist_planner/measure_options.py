"""The options by which `unidist doctor` measures this machine for `unidist plan`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from unidist.errors import ConfigurationError
from unidist_launch.options.numbers import Whole

OPTIONS = (
    click.Option(
        ["--measure"],
        type=click.Path(path_type=Path, dir_okay=False),
        help="Instead, start ranks that time arithmetic, memory and messages (seconds), and write a file for unidist "
        "plan.",
    ),
    click.Option(
        ["--measure-ranks"], type=Whole(min=1), help="Number of these ranks. Default: one for each core, at least 2."
    ),
    click.Option(["--measure-engine"], metavar="NAME", help="Engine to measure. Default: what a job would get here."),
)


def run(options: Mapping[str, Any]) -> int:
    """Measure, write the file and show it.

    Args:
        options: of `unidist doctor`.

    Raises:
        ConfigurationError: no file is given, or it cannot be written.
    """
    target: Path | None = options["measure"]
    if target is None:
        name = next(name for name in ("measure_ranks", "measure_engine") if options[name] is not None)
        raise ConfigurationError(f"--{name.replace('_', '-')} is about measuring: give --measure FILE too")
    from unidist_planner import measure
    from unidist_planner.step_time import measurements

    if not os.access(target.parent, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise ConfigurationError(f"{target} cannot be written, so nothing was measured; give --measure another file")
    found = measure.measured(options["measure_ranks"], options["measure_engine"])
    measurements.write(found, target)
    if options["as_json"]:
        click.echo(target.read_text(encoding="utf-8"), nl=False)
    else:
        measure.show(found, target)
    return 0
