"""`unidist build`: builds software that cannot be had ready-made."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import click

from unidist_launch.options.numbers import Whole


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def build() -> None:
    """Build what unidist can use and the package index does not have ready-made."""


@build.command("horovod", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--mpi", is_flag=True, help="Build with MPI too; needs mpicxx.")
@click.option("--nccl", is_flag=True, help="Build with NCCL for GPUs; needs the CUDA toolkit and NCCL's headers.")
@click.option("--force", is_flag=True, help="Build and install again, whatever is installed or cached.")
@click.option("--wheel-only", is_flag=True, help="Only make the wheel in the cache and print its path.")
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where wheels and logs are kept (default: unidist under $XDG_CACHE_HOME, or ~/.cache).",
)
@click.option(
    "--timeout",
    type=Whole(min=1),
    default=7200,
    show_default=True,
    metavar="SECONDS",
    help="Give up after this time.",
)
def horovod(mpi: bool, nccl: bool, force: bool, wheel_only: bool, cache_dir: Path | None, timeout: int) -> int:
    """Build Horovod 0.28.1 for the installed PyTorch and TensorFlow, install it, and try it on two processes.

    Takes about 9 minutes on 2 cores. The wheel is cached; when the right one is installed, nothing is done.
    """
    from unidist_launch.horovod_build import build as horovod_build

    horovod_build.run(
        horovod_build.Wanted.here(mpi=mpi, nccl=nccl),
        force=force,
        wheel_only=wheel_only,
        cache_dir=cache_dir,
        timeout=timedelta(seconds=timeout),
    )
    return 0
