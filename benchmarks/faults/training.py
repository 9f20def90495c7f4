"""What the ranks of a campaign run: sums whose total says whether each step of each rank counted once.

`script.py KIND`: of plain and elastic jobs. With "servers" the sum is kept by parameter servers, with "data" its terms
come from data workers; both take PyTorch.
"""

from __future__ import annotations

import array
import os
import sys
import time
from collections.abc import Callable
from typing import Any

STEPS = 100
PACE_SEC = 0.03
_TERMS = 12
_SERVED = 64


def total() -> float:
    """Return what one process would compute."""
    return sum(i * i * 0.25 for i in range(STEPS * _TERMS))


def main() -> None:
    """Run the kind of script that the command line names."""
    {"plain": _plain, "elastic": _elastic, "servers": _servers, "data": _data}[sys.argv[1]]()


def _say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def _meet_faults() -> None:
    """Do to itself what no signal can do to a process."""
    if os.path.exists(f"raise-{os.getpid()}"):
        os.rename(f"raise-{os.getpid()}", f"raised-{os.getpid()}")
        raise RuntimeError("a fault of the campaign")
    if os.path.exists(f"hold lock-{os.getpid()}"):
        import ctypes

        while True:
            ctypes.PyDLL(None).sleep(100)
    if os.path.exists(f"no memory-{os.getpid()}"):
        os.rename(f"no memory-{os.getpid()}", f"had no memory-{os.getpid()}")
        _ = bytearray(1 << 50)


def _sum_of(step: int) -> float:
    from unidist.buffer import Buffer
    from unidist.runtime import context

    _meet_faults()
    place = context.current().topology
    mine = range(step * _TERMS + place.rank, (step + 1) * _TERMS, place.world_size)
    part = array.array("d", [sum(i * i * 0.25 for i in mine)])
    context.current().world.allreduce(Buffer.of(part), Buffer.of(part)).wait()
    time.sleep(PACE_SEC)
    return part[0]


def _plain() -> None:
    from unidist.runtime import context

    context.init()
    found = 0.0
    for step in range(STEPS):
        found += _sum_of(step)
        _say("step", step + 1, context.current().topology.rank, os.getpid())
    _say("total", found)


def _elastic() -> None:
    from unidist import elastic
    from unidist.runtime import context

    context.init()
    state = elastic.ObjectState(step=0, total=0.0)

    @elastic.run
    def train(state: Any) -> float:
        _say("enter", context.current().topology.rank, os.getpid())
        while state.step < STEPS:
            state.total += _sum_of(state.step)
            state.step += 1
            state.commit()
            _say("step", state.step, context.current().topology.rank, os.getpid())
        return float(state.total)

    _say("total", train(state))


def _servers() -> None:
    import torch

    import unidist.torch as ud

    ud.init()
    weights = torch.nn.Parameter(torch.zeros(_SERVED, dtype=torch.float64))
    optimizer: Any = torch.optim.SGD([weights], lr=1.0)
    optimizer = ud.distribute(torch.nn.ParameterList([weights]), optimizer)[1]

    def push(gradient: Any) -> None:
        optimizer.zero_grad()
        (weights * gradient).sum().backward()
        optimizer.step()

    for step in range(STEPS):
        _meet_faults()
        push(-sum(i * i * 0.25 for i in range(step * _TERMS + ud.rank(), (step + 1) * _TERMS, ud.size())))
        _say("step", step + 1, ud.rank(), os.getpid())
        time.sleep(PACE_SEC)
    ud.barrier()
    push(0.0)
    values = set(weights.detach().tolist())
    _say("total", values.pop() if len(values) == 1 else f"{len(values)} different ones")


def _data() -> None:
    import torch

    import unidist.torch as ud

    ud.init()

    def of_epoch(note: Callable[[int], None]) -> float:
        found = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(loader):
            _meet_faults()
            found += batch.sum()
            note(number)
            time.sleep(PACE_SEC)
        return float(ud.allreduce(found, op=ud.Sum))

    terms = torch.arange(STEPS * _TERMS, dtype=torch.float64) ** 2 * 0.25
    plain = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(terms), batch_size=_TERMS // 2, collate_fn=_first
    )
    loader = ud.data_service(ud.shard(plain), ahead=2)
    _say("total", of_epoch(lambda number: _say("step", number + 1, ud.rank(), os.getpid())))


def _first(samples: Any) -> Any:
    import torch

    return torch.stack([sample[0] for sample in samples])


if __name__ == "__main__":
    main()
