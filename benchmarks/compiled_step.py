"""One training step of the GPT, compiled: without communication, with unidist, with DistributedDataParallel over gloo.

Run by `python -m benchmarks`, which starts it on two ranks.
"""

from __future__ import annotations

import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import unidist.torch as ud
from benchmarks.gpt_step import Wrap, measure

BACKENDS = ("aot_eager", "inductor")


def _wraps(backend: str) -> dict[str, Wrap]:
    bucketed = ud.bucketed_backend(backend, bucket_mb=8)

    def distributed(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = ud.distribute(model, optimizer)
        return torch.compile(model, backend=bucketed), optimizer

    return {
        f"{backend}, no communication": lambda model, optimizer: (torch.compile(model, backend=backend), optimizer),
        f"{backend}, unidist": distributed,
        f"{backend}, DDP over gloo": lambda model, optimizer: (
            torch.compile(DistributedDataParallel(model), backend=backend),
            optimizer,
        ),
    }


if __name__ == "__main__":
    measure(
        {name: wrap for backend in BACKENDS for name, wrap in _wraps(backend).items()}, sys.argv[1], int(sys.argv[2])
    )
