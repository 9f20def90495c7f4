"""A GPT on samples of variable length: batches of so many samples, divided by cost or not, and of so many tokens.

    unidist launch -np 2 python -m benchmarks.token_budget EPOCHS

Rank 0 prints for each way the medians over epochs: tokens without padding in a second, steps in a second, the share of
padding, and the work of the rank that has most in a step, of the mean.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import unidist.torch as ud
from benchmarks.gpt import CONTEXT, GPT, VOCABULARY

SAMPLES, BATCH, BLOCKS, IGNORED = 256, 16, 2, -100


def collate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets with padding up to the longest sample."""
    pad = torch.nn.utils.rnn.pad_sequence
    return pad([each[:-1] for each in samples], True, 0), pad([each[1:] for each in samples], True, IGNORED)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over all tokens that count."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def epoch(step: Any, loader: Any) -> dict[str, float]:
    """Train an epoch; return its figures, of all ranks."""
    padded, counted, works = 0, 0, list[int]()
    ud.barrier()
    start = time.perf_counter()
    for tokens, targets in loader:
        step(tokens, targets)
        works.append(tokens.numel())
        counted += int((targets != IGNORED).sum())
        padded += tokens.numel()
    seconds = time.perf_counter() - start
    every = ud.allgather(torch.tensor([works]))
    most = float((every.max(0).values / every.double().mean(0)).mean())
    sums = ud.allreduce(torch.tensor([counted, padded], dtype=torch.float64), op=ud.Sum)
    slowest = float(ud.allreduce(torch.tensor(seconds, dtype=torch.float64), op=ud.Max))
    return {
        "tokens/s": float(sums[0]) / slowest,
        "steps/s": len(works) / slowest,
        "padding": 1 - float(sums[0] / sums[1]),
        "most work of the mean": most,
    }


def measure(epochs: int) -> None:
    """Measure each way in turn."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randn(SAMPLES, generator=generator).mul(0.7).add(2.9).exp().round().clamp(2, CONTEXT).long()
    data: Any = [torch.randint(VOCABULARY, (int(each) + 1,), generator=generator) for each in lengths]
    mean = float(lengths.double().mean())
    torch.manual_seed(0)
    model = GPT()
    model.blocks = model.blocks[:BLOCKS]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step = ud.TrainStep(model, optimizer, loss_of, weight=lambda targets: (targets != IGNORED).sum())

    def loader(batch_size: int, **options: Any) -> Any:
        return ud.shard(DataLoader(data, batch_size, shuffle=True, collate_fn=collate), tail="drop", **options)

    ways = {
        f"batch_size={BATCH}": loader(BATCH),
        f"batch_size={BATCH}, cost=": loader(BATCH, cost=lengths.tolist()),
        f"max_tokens={round(BATCH * mean)}": loader(1, cost=lengths.tolist(), max_tokens=round(BATCH * mean)),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(-1, epochs):
        for name, way in ways.items():
            figures = epoch(step, way)
            if number >= 0:
                found[name].append(figures)
    if ud.rank() == 0:
        for name, each in found.items():
            medians = {what: statistics.median(figures[what] for figures in each) for what in each[0]}
            print(f"{name}: " + ", ".join(f"{what} {value:.3g}" for what, value in medians.items()))


if __name__ == "__main__":
    ud.init()
    measure(int(sys.argv[1]))
    ud.shutdown()
