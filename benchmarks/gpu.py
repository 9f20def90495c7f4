"""Measure unidist over NCCL beside PyTorch: `python -m benchmarks.gpu`, or `make bench-gpu`. Never run on a GPU so far.

One rank for each device. Prints three tables: bandwidth of all-reduces, time of a training step, memory of a device.
"""

from __future__ import annotations

import importlib.util
import sys

import click

from benchmarks.gpu_tables import bandwidth_table, memory_table, step_table
from benchmarks.jobs import under_unidist

STRATEGIES = ("data", "zero=1", "zero=2", "zero=3", "zero=2:offload=host", "zero=3:offload=host", "DDP", "FSDP2")


@click.command(help=__doc__)
@click.option("--repetitions", type=click.IntRange(min=1), default=20, help="Of each measurement.", show_default=True)
@click.option("-np", "num_proc", type=click.IntRange(min=1), default=None, help="Ranks. Default: all devices.")
def main(repetitions: int, num_proc: int | None) -> None:
    """Measure, unless there is nothing to measure on."""
    refusal, num_devices = _look()
    if not refusal and num_proc is not None and num_proc > num_devices:
        refusal = f"-np {num_proc}: there are {num_devices} device(s), and NCCL allows no two ranks on one"
    if refusal:
        click.echo(f"bench-gpu: nothing was measured: {refusal}", err=True)
        sys.exit(1)
    ranks = num_proc or num_devices
    if ranks == 1:
        click.echo(
            "bench-gpu: one rank: NCCL allows no two on a device. The bus bandwidth of one rank is 0 by definition, "
            "and the steps show what unidist costs beside its communication."
        )
    options = ("--engine", "nccl")
    found = under_unidist("benchmarks.gpu_ranks", ranks, repetitions, "bandwidth", options=options)
    click.echo("\n".join(bandwidth_table(found, ranks)))
    click.echo(
        "\n".join(step_table(under_unidist("benchmarks.gpu_ranks", ranks, repetitions, "step", options=options)))
    )
    # Each in a job of its own: the allocator's peak is one of the process.
    peaks = {
        name: under_unidist("benchmarks.gpu_ranks", ranks, 3, "memory", name, options=options) for name in STRATEGIES
    }
    click.echo("\n".join(memory_table(peaks)))


def _look() -> tuple[str, int]:
    """Return why nothing can be measured, or "", and the number of devices."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed", 0
    import torch
    import torch.distributed

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is no build for CUDA", 0
    if not torch.cuda.device_count():
        return "no CUDA device is visible to torch", 0
    if not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} has no NCCL", 0
    return "", torch.cuda.device_count()


if __name__ == "__main__":
    main()
