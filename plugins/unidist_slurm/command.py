"""`unidist slurm`: what goes before a job on a Slurm cluster."""

from __future__ import annotations

import sys
from typing import Any

import click

from unidist_launch.options.numbers import Whole
from unidist_slurm.script import BatchScript

_HELP = {"help_option_names": ["-h", "--help"]}
_COUNT = Whole(min=1)


@click.group(context_settings=_HELP)
def slurm() -> None:
    """Write scripts for Slurm. Inside of an allocation `unidist launch` needs no more options than elsewhere."""


@slurm.command(context_settings={**_HELP, "allow_interspersed_args": False})
@click.option("--nodes", type=_COUNT, default=1, show_default=True, metavar="N", help="Number of nodes.")
@click.option("--ntasks-per-node", type=_COUNT, required=True, metavar="N", help="Ranks on each node.")
@click.option("--cpus-per-task", type=_COUNT, metavar="N", help="Cores of each rank.")
@click.option("--gpus-per-node", metavar="N", help="GPUs of each node, as sbatch takes them: 8, or a100:8.")
@click.option("--mem", metavar="SIZE", help="Memory of each node: 64G.")
@click.option("--time", metavar="TIME", help="Time limit: minutes, HH:MM:SS or D-HH:MM:SS.")
@click.option("--partition", metavar="NAME", help="Partition.")
@click.option("--account", metavar="NAME", help="Account.")
@click.option("--qos", metavar="NAME", help="Quality of service.")
@click.option("--job-name", default="unidist", show_default=True, metavar="NAME", help="Name of the job.")
@click.option("--output", metavar="FILE", help="File for what the job prints; %j is its number.")
@click.option("--exclusive", is_flag=True, help="The nodes run nothing else.")
@click.option("--sbatch", "more", multiple=True, metavar="OPTION", help="Another option of sbatch. Repeatable.")
@click.option(
    "--setup", multiple=True, metavar="LINE", help="Shell line before the job: 'module load cuda'. Repeatable."
)
@click.option(
    "--python", "interpreter", default=sys.executable, metavar="FILE", help="Python of the nodes, if another."
)
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED)
def script(
    arguments: tuple[str, ...], more: tuple[str, ...], setup: tuple[str, ...], interpreter: str, **options: Any
) -> None:
    """Print a script for sbatch that runs `unidist launch ARGUMENTS`.

    \b
      unidist slurm script --nodes 2 --ntasks-per-node 4 --time 1:00:00 train.py --lr 0.1 > job.sh
      unidist slurm script --nodes 2 --ntasks-per-node 4 -- --strategy zero=2 train.py > job.sh
      sbatch job.sh

    Options of `unidist launch` stand after two dashes. There are as many ranks as tasks, unless -np says otherwise.
    """
    from unidist_launch.commands.arguments import check_launch

    check_launch(arguments, scheduler="Slurm")
    named = {name.replace("_", "-"): value for name, value in options.items()}
    click.echo(BatchScript(interpreter, arguments, named, more, setup).text(), nl=False)
