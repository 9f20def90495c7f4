"""The tables of `make bench-gpu`, line by line. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from unidist_bench import bus_factor
from unidist_bench.collectives import Collective


def bandwidth_table(medians: Mapping[str, float], num_ranks: int) -> list[str]:
    """Return time and bandwidths of all-reduces, as nccl-tests defines them.

    Args:
        medians: seconds, by "SIDE, BYTES".
        num_ranks: that took part.
    """
    factor = bus_factor(Collective.ALLREDUCE, num_ranks)
    lines = [f"{'all-reduce':<28}{'bytes':>12}{'time us':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}"]
    for name, seconds in medians.items():
        side, _, size = name.rpartition(", ")
        bandwidth = int(size) / seconds / 1e9
        lines.append(f"{side:<28}{size:>12}{seconds * 1e6:>12.1f}{bandwidth:>12.2f}{bandwidth * factor:>12.2f}")
    return lines


def step_table(medians: Mapping[str, float]) -> list[str]:
    """Return the time of a training step of each side, and by that of the peer that is named behind it.

    Args:
        medians: seconds, by side; a side "A of B" is compared with side "B".
    """
    lines = [f"{'training step of the GPT':<28}{'time ms':>12}{'of the peer':>14}"]
    for name, seconds in medians.items():
        side, _, peer = name.partition(" of ")
        ratio = f"{seconds / medians[peer]:.3f}" if peer else ""
        lines.append(f"{side:<28}{seconds * 1e3:>12.2f}{ratio:>14}")
    return lines


def memory_table(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the memory of rank 0's device by strategy.

    Args:
        figures: bytes by "kept" (between steps) and "peak", by strategy.
    """
    lines = [f"{'device memory of the GPT':<28}{'kept MiB':>12}{'peak MiB':>12}"]
    lines += [f"{name:<28}{each['kept'] / 2**20:>12.1f}{each['peak'] / 2**20:>12.1f}" for name, each in figures.items()]
    return lines
