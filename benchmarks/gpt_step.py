"""One training step of the GPT: without communication, with unidist, with DistributedDataParallel over gloo.

Run by `python -m benchmarks`, which starts it on two ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import unidist.torch as ud
from benchmarks.gloo_meeting import gloo_meeting
from benchmarks.gpt import CONTEXT, GPT, VOCABULARY
from unidist_bench import side_by_side

BATCH = 4


Wrap = Callable[[torch.nn.Module, torch.optim.Optimizer], tuple[torch.nn.Module, torch.optim.Optimizer]]


def make_step(wrap: Wrap) -> Callable[[], None]:
    """Return a function that does one step of a model of its own."""
    torch.manual_seed(0)
    model: torch.nn.Module = GPT()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    model, optimizer = wrap(model, optimizer)
    ids = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))

    def step() -> None:
        optimizer.zero_grad()  # which forgets them: set_to_none is the default, and Horovod takes no argument
        logits = model(ids[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def measure(wraps: Mapping[str, Wrap], output: str, repetitions: int) -> None:
    """Measure the step without communication and with each of `wraps`; rank 0 writes the medians (seconds)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ud.init()
    meeting = gloo_meeting()
    wraps = {"no communication": lambda model, optimizer: (model, optimizer), **wraps}
    medians = side_by_side({name: make_step(wrap) for name, wrap in wraps.items()}, meeting, repetitions=repetitions)
    if ud.rank() == 0:
        with open(output, "w") as file:
            json.dump(medians, file)
    ud.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    measure(
        {
            "unidist": ud.distribute,
            "DDP over gloo": lambda model, optimizer: (DistributedDataParallel(model), optimizer),
        },
        sys.argv[1],
        int(sys.argv[2]),
    )
