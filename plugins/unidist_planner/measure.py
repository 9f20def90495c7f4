"""`unidist doctor --measure`: starts ranks on this host that time it, and fits lines through what they found."""

from __future__ import annotations

import platform
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from unidist.errors import ConfigurationError
from unidist_launch.display import machine

if TYPE_CHECKING:
    from unidist_planner.step_time.benchmark import RankFigures
    from unidist_planner.step_time.measurements import Measurements

_TIMEOUT = timedelta(minutes=5)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def measured(num_ranks: int | None, engine: str | None) -> Measurements:
    """Start ranks on this host, let them measure together, and return what they found.

    Args:
        num_ranks: default: one for each core, at least 2. Each computes with its share of the cores.
        engine: as for `unidist launch`; default: what a job with these ranks would get.

    Raises:
        ConfigurationError: fewer than two ranks, an engine that cannot be used.
        RemoteError: a rank failed; says which and why.
        StalledError: the ranks did not answer in time.
    """
    from unidist.jobs.pool.pool import RankPool
    from unidist_planner.step_time.benchmark import measure
    from unidist_planner.step_time.measurements import Measurements, fitted

    cores = machine.usable_cores()
    count = max(2, cores) if num_ranks is None else num_ranks
    if count < 2:
        raise ConfigurationError(f"--measure-ranks {count}: one rank exchanges nothing; measure with 2 or more")
    threads = str(max(1, cores // count))
    with RankPool(count, env=dict.fromkeys(_THREADS, threads), engine=engine, timeout=_TIMEOUT) as pool:
        found: list[RankFigures] = pool.run(measure)
    total, _ = machine.memory_bytes()
    limit = machine.container_memory_bytes()
    return Measurements(
        host=platform.node(),
        num_ranks=count,
        engine=found[0].engine,
        dtype=found[0].dtype,
        flops=min(item.flops for item in found),  # all wait for the slowest
        memory_bandwidth=min(item.memory_bandwidth for item in found),
        memory_bytes=min(total, limit or total) / count,
        message=fitted(found[0].messages),
        allreduce=fitted(found[0].allreduces),
    )


def show(found: Measurements, path: Path) -> None:
    """Print what was found and where it is."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        show_header=False, title=f"measured with {found.num_ranks} ranks on {found.host}", title_justify="left"
    )
    table.add_row("arithmetic", f"{found.flops / 1e9:.4g} GFLOP/s for each rank ({found.dtype} matrix products)")
    table.add_row("memory", f"{found.memory_bandwidth / 1e9:.3g} GB/s for each rank")
    for name, line in (("message", found.message), ("all-reduce", found.allreduce)):
        rate = f"{1e-9 / line.each:.3g} GB/s" if line.each else "no longer for more bytes"
        table.add_row(name, f"{line.fixed * 1e6:.3g} us, then {rate}")
    table.add_row("engine", found.engine)
    table.add_row("written to", str(path))
    console = Console()
    console.print(table)
    console.print(f"unidist plan --measured {path} -np {found.num_ranks} ...", highlight=False)
