"""One training step of the GPT: without communication, with unidist, with DistributedDataParallel over gloo.

Run by `python -m benchmarks`, which starts it on two ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import unidist.torch as ud
from benchmarks.gloo_meeting import gloo_meeting
from benchmarks.gpt import CONTEXT, GPT, VOCABULARY
from benchmarks.timing import side_by_side

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


def main(output: str, repetitions: int) -> None:
    """Measure, and let rank 0 write the medians (seconds) to `output`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ud.init()
    meeting = gloo_meeting()
    medians = side_by_side(
        {
            "no communication": make_step(lambda model, optimizer: (model, optimizer)),
            "unidist": make_step(ud.distribute),
            "DDP over gloo": make_step(lambda model, optimizer: (DistributedDataParallel(model), optimizer)),
        },
        meeting,
        repetitions=repetitions,
    )
    if ud.rank() == 0:
        with open(output, "w") as file:
            json.dump(medians, file)
    ud.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
