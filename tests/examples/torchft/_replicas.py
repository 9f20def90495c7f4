"""A replica of a torchft job that writes down what went into each step, so that one process can repeat the job.

Replica 1 kills itself where the others go on into an all-reduce. torchrun starts it again. The job ends when all
replicas have trained together for some steps after that.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchft import Manager, Optimizer

from unidist_torch_backend.torchft import ProcessGroupUnidist

REPLICAS, FATAL_STEP, TOGETHER = 3, 3, 4
LIMIT = timedelta(seconds=30)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 2)).double()


def batch(replica: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * replica + step), dtype=torch.float64)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def main(replica: int, folder: Path) -> None:
    torch.set_num_threads(1)
    is_first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    together = 0
    (folder / f"notes{replica}").touch()

    def write(note: dict[str, Any]) -> None:
        with open(folder / f"notes{replica}", "a", encoding="utf-8") as notes:
            notes.write(json.dumps(note) + "\n")

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "together": together}

    def load_state_dict(state: dict[str, Any]) -> None:
        nonlocal together
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        together = state["together"]

    group = ProcessGroupUnidist(timeout=LIMIT)
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica_{replica}",
        timeout=LIMIT,
    )
    model = network()
    optimizer = Optimizer(manager, optimizer_of(model))

    while len(list(folder.glob("notes*"))) < REPLICAS:  # torchft begins without those that are late
        time.sleep(0.05)
    while together < TOGETHER:
        optimizer.zero_grad()
        step = manager.current_step()
        loss = model(batch(replica, step)).square().mean()
        manager.wait_quorum()
        note = {
            "step": manager.current_step(),  # a replica that was behind has the others' by now
            "drawn": step,
            "quorum": manager._quorum_id,
            "takes part": manager.is_participating(),
            "replicas": manager.num_participants(),
        }
        write(note)
        loss.backward()
        begin = time.monotonic()
        for number, parameter in enumerate(model.parameters()):
            if (replica, number, note["step"]) == (1, 2, FATAL_STEP) and is_first_life:
                os.kill(os.getpid(), signal.SIGKILL)
            manager.allreduce(parameter.grad).wait()
        seconds = time.monotonic() - begin
        optimizer.step()
        done = manager.current_step() == note["step"] + 1
        write({**note, "done": done, "seconds": seconds})
        if done and note["step"] > FATAL_STEP and note["replicas"] == REPLICAS:
            together += 1
        time.sleep(0.05)  # leaves the replica that comes back a chance
    weights = [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]
    (folder / f"weights{replica}").write_text(json.dumps(weights), encoding="utf-8")
    manager.shutdown(wait=False)
    group.shutdown()


if __name__ == "__main__":
    main(int(os.environ["REPLICA"]), Path(sys.argv[1]))
