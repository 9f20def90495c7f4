"""`unidist horovodrun`: the command line of horovodrun, for scripts that import horovod."""

from __future__ import annotations

import click

from unidist_launch.commands.launch import launch
from unidist_launch.horovod.arguments import translated
from unidist_launch.options.config_file import UNKNOWN_IS_WARNED


@click.command(
    context_settings={
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
        "help_option_names": [],  # `unidist launch` has the options
    }
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def horovodrun(arguments: tuple[str, ...]) -> int:
    """Run a script of Horovod's, with the flags of horovodrun 0.28.1 and its configuration files.

    `unidist horovodrun -np 4 python train.py` is `unidist launch --as-horovod -np 4 python train.py`, but for a few
    flags that mean something else there: -v is --version, -p is --ssh-port, and --stall-check takes no value.
    """
    found = translated(arguments, _num_values())
    for warning in found.warnings:
        click.echo(f"unidist: warning: {warning}", err=True)
    code: int = launch.main(
        args=["--as-horovod", *found.arguments],
        prog_name="unidist horovodrun",
        standalone_mode=False,
        obj=UNKNOWN_IS_WARNED,
    )
    return code


def _num_values() -> dict[str, int]:
    """Return the number of values of each flag of `unidist launch`."""
    return {
        name: 0 if option.is_flag else option.nargs
        for option in launch.params
        if isinstance(option, click.Option)
        for name in (*option.opts, *option.secondary_opts)
    } | {"--help": 0, "-h": 0}
