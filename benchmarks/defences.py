"""What `--verify` and the watch for deadlocks cost: the GPT's first steps, its later ones, and small all-reduces.

Run by `python -m benchmarks`, which starts it on two ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn import functional

import unidist.torch as ud
from benchmarks.gloo_meeting import gloo_meeting
from benchmarks.gpt import CONTEXT, GPT, VOCABULARY

BATCH = 4
STRATEGIES = ("data", "zero=3", "tensor=2", "pipeline=2")
FIRST_STEPS = 10
"""`--verify first` compares values up to this one."""
LATER_STEPS = 5
SMALL_CALLS = 200
VARIANTS = {
    "both": {"UNIDIST_VERIFY": "first", "UNIDIST_DEADLOCK_SEC": "2"},
    "no --verify": {"UNIDIST_VERIFY": "off", "UNIDIST_DEADLOCK_SEC": "2"},
    "neither": {"UNIDIST_VERIFY": "off", "UNIDIST_DEADLOCK_SEC": "0"},
}
REPLAY, REPLAYED = "replay=1", "data"
"""Every step computes its batch twice before it trains on it; measured with this strategy alone."""


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(strategy: str) -> dict[str, float]:
    """Return the seconds until the first step is done, until the first ten are, and of a later one."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    ids = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))
    dist.barrier()
    start = time.perf_counter()
    step = ud.TrainStep(model, optimizer, loss_of)
    ends = []
    for _ in range(FIRST_STEPS + 1 + LATER_STEPS):
        step(ids[:, :-1], ids[:, 1:])
        ends.append(time.perf_counter())
    later = [end - begin for begin, end in zip(ends[FIRST_STEPS:], ends[FIRST_STEPS + 1 :], strict=False)]
    return {
        f"{strategy}: first step": ends[0] - start,
        f"{strategy}: first {FIRST_STEPS} steps": ends[FIRST_STEPS - 1] - start,
        f"{strategy}: later step": statistics.median(later),
    }


def small_allreduce() -> dict[str, float]:
    """Return the seconds of an all-reduce of 4 KB by name."""
    tensor = torch.ones(1024)
    for _ in range(SMALL_CALLS // 4):
        ud.allreduce_(tensor, name="small")
    dist.barrier()
    start = time.perf_counter()
    for _ in range(SMALL_CALLS):
        ud.allreduce_(tensor, name="small")
    return {"4 KB": (time.perf_counter() - start) / SMALL_CALLS}


def measure(output: str, repetitions: int) -> None:
    """Measure each variant in turn, in an order that rotates; rank 0 writes the medians (seconds)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    meeting = gloo_meeting()
    variants = {**VARIANTS, REPLAY: {"UNIDIST_VERIFY": REPLAY, "UNIDIST_DEADLOCK_SEC": "0"}}
    names = [(variant, strategy) for strategy in STRATEGIES for variant in VARIANTS] + [(REPLAY, REPLAYED)]
    found: dict[str, list[float]] = {}
    for repetition in range(-1, repetitions):
        for turn in range(len(names)):
            variant, strategy = names[(turn + max(repetition, 0)) % len(names)]
            os.environ.update(variants[variant], UNIDIST_STRATEGY=strategy)
            ud.init()
            seconds = train(strategy)
            if strategy == "data" and variant in VARIANTS:
                seconds |= small_allreduce()
            ud.shutdown()
            if repetition >= 0:
                for what, value in seconds.items():
                    found.setdefault(f"{what}, {variant}", []).append(value)
    everyone: Sequence[Sequence[Sequence[float]]] = meeting.all_durations(list(found.values()))
    if dist.get_rank() == 0:
        slowest = [
            [max(values) for values in zip(*column, strict=True)] for column in zip(*everyone, strict=True)
        ]  # by column, then repetition
        with open(output, "w") as file:
            json.dump(dict(zip(found, map(statistics.median, slowest), strict=True)), file)
    dist.destroy_process_group()


if __name__ == "__main__":
    measure(sys.argv[1], int(sys.argv[2]))
