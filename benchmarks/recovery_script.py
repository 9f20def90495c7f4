"""What each of them trains while a rank is killed: the same model, and for unidist and Horovod the same lines.

Run as `recovery_script.py unidist|horovod|torchrun FOLDER`; every rank adds a line to FOLDER/steps for each step that
it completed: time, process, rank, number of ranks, step.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

PACE_SEC = 0.05


def main() -> None:
    """Train until somebody ends the job."""
    layer, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    steps = os.open(folder / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def record(rank: int, size: int, step: int) -> None:
        os.write(steps, f"{time.time()} {os.getpid()} {rank} {size} {step}\n".encode())

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    if layer == "torchrun":
        _restarted(model, folder, record)
    else:
        _elastic(importlib.import_module(f"{layer}.torch"), model, record)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
    time.sleep(PACE_SEC)


def _elastic(hvd: Any, model: torch.nn.Module, record: Any) -> None:
    """Train with Horovod's elastic interface, of whichever module has it."""
    hvd.init()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while True:
            _step(model, optimizer)
            state.step += 1
            state.commit()
            record(hvd.rank(), hvd.size(), state.step)

    train(state)


def _restarted(model: torch.nn.Module, folder: Path, record: Any) -> None:
    """Train as torchrun's documentation says: every process is started again, and loads the last snapshot."""
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    snapshot, step = folder / "snapshot.pt", 0
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    while True:
        _step(wrapped, optimizer)
        step += 1
        if rank == 0:  # at every step, as the others commit at every step
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "snapshot.new")
            os.replace(folder / "snapshot.new", snapshot)
        record(rank, size, step)


if __name__ == "__main__":
    main()
