"""The weights of a divided GPT on every rank, on one, and in another division: without a disk, and by a checkpoint.

    unidist launch -np 2 --strategy zero=3 python -m benchmarks.redistribution FOLDER REPETITIONS

Rank 0 prints the medians (seconds), and times as long as a save and a load.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import unidist.torch as ud
from benchmarks.gpt import GPT


def seconds(call: Callable[[], object]) -> float:
    """Return how long the slowest rank takes."""
    ud.barrier()
    start = time.perf_counter()
    call()
    return float(ud.allreduce(torch.tensor(time.perf_counter() - start, dtype=torch.float64), op=ud.Max))


def measure(folder: Path, repetitions: int) -> None:
    """Measure each way in turn."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: torch.nn.Module = GPT()
    step = ud.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=3e-4), lambda out, _: out.square().mean())
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    step(tokens, tokens)
    whole, path = GPT(), folder / "checkpoint"
    is_last = ud.rank() == ud.size() - 1

    def saved_and_loaded() -> None:
        ud.save(path, step.model)
        ud.load(path, whole)

    ways = {
        "a save and a load": saved_and_loaded,
        "to every rank": lambda: ud.redistribute(step.model, to=whole),
        "to one rank": lambda: ud.redistribute(step.model, to=whole if is_last else None),
        "a state dict on one rank": lambda: ud.redistribute(step.model, to=[ud.size() - 1]),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(-1, repetitions):
        for name, way in ways.items():
            took = seconds(way)
            if repetition >= 0:
                found[name].append(took)
    if ud.rank() == 0:
        shutil.rmtree(path)
        medians = {name: statistics.median(values) for name, values in found.items()}
        for name, median in medians.items():
            print(f"{name}: {median * 1e3:.0f} ms, {median / medians['a save and a load']:.3f}")


if __name__ == "__main__":
    ud.init()
    measure(Path(sys.argv[1]), int(sys.argv[2]))
    ud.shutdown()
