"""Wrong calls on every rank, and what each raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _groups import world


def wrong_calls() -> dict[str, Callable[[], object]]:
    """Return the calls, by name. On a machine without a GPU, "meta" stands for a device that is not the CPU."""
    size = dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    elsewhere = torch.zeros(3, device="meta")
    return {
        "all_reduce elsewhere": lambda: dist.all_reduce(elsewhere),
        "broadcast elsewhere": lambda: dist.broadcast(elsewhere, 0),
        "send elsewhere": lambda: dist.send(elsewhere, (dist.get_rank() + 1) % size),
        "all_gather elsewhere": lambda: dist.all_gather([elsewhere] * size, elsewhere),
        "memory elsewhere": lambda: group.allocate_tensor(3, dtype=torch.float32, device=torch.device("meta")),
        "float8": lambda: dist.all_reduce(torch.zeros(3, dtype=torch.float8_e4m3fn)),
        "mean of bool": lambda: dist.all_reduce(torch.zeros(3, dtype=torch.bool), dist.ReduceOp.AVG),
        "bits of floats": lambda: dist.all_reduce(torch.zeros(3), dist.ReduceOp.BAND),
        "sparse broadcast": lambda: dist.broadcast(torch.zeros(3).to_sparse(), 0),
        "all_gather of 2 dtypes": lambda: group.allgather([[torch.zeros(3)] * size], [torch.zeros(3).double()]),
        "too few outputs": lambda: group.allgather([[torch.zeros(3)]], [torch.zeros(3)]),
        "output too small": lambda: group.all_gather_single(torch.zeros(3), torch.zeros(3)),
        "rows do not divide": lambda: group.reduce_scatter_single(torch.zeros(1), torch.zeros(2 * size + 1)),
        "splits do not fit": lambda: group.all_to_all_single(torch.zeros(4), torch.zeros(4), [1] * size, [9] * size),
        "no such root": lambda: group.broadcast(torch.zeros(3), root=size),
        "options": lambda: dist.new_group(pg_options=object()),
    }


def refused(folder: str, rank: int, size: int) -> dict[str, tuple[str, str]]:
    """Return the kind and the text of each error; the group works afterwards."""
    found = {}
    with world(folder, rank, size):
        for name, call in wrong_calls().items():
            try:
                call()
            except Exception as exc:
                found[name] = (type(exc).__name__, str(exc))
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == size
    return found


def all_calls(folder: str, rank: int, size: int) -> list[str]:
    """Return the names of the calls."""
    with world(folder, rank, size):
        return list(wrong_calls())


def float8_moves(folder: str, rank: int, size: int) -> bool:
    """Return whether tensors of a dtype without arithmetic arrive."""
    with world(folder, rank, size):
        sent = torch.full((5,), 1.5).to(torch.float8_e4m3fn) if rank == 0 else torch.zeros(5, dtype=torch.float8_e4m3fn)
        dist.broadcast(sent, 0)
        return bool((sent.float() == 1.5).all())


def operations_beyond_gloo(folder: str, rank: int, size: int) -> list[list[float]]:
    """Carry out what gloo has not: means, factors before the sum, uneven sizes, logic of bool."""
    found = []
    with world(folder, rank, size):
        mean = torch.tensor([1.0 + rank, 4.0])
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        whole = torch.tensor([1 + rank, 4])
        dist.all_reduce(whole, dist.ReduceOp.AVG)
        weighted = torch.tensor([1.0, 2.0])
        dist.all_reduce(weighted, dist._make_nccl_premul_sum(float(rank + 1)))
        logic = torch.tensor([rank == 0, True, False])
        dist.all_reduce(logic, dist.ReduceOp.BAND)
        either = torch.tensor([rank == 0, True, False])
        dist.all_reduce(either)
        uneven = [torch.zeros(each + 1) for each in range(size)]
        dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
        own = torch.zeros(rank + 1)
        dist.reduce_scatter(own, [torch.full((each + 1,), float(each)) for each in range(size)])
        product = torch.tensor([1 + 1j])
        assert dist.group.WORLD is not None
        dist.group.WORLD.allreduce([product], dist.ReduceOp.PRODUCT).wait()
        found += [each.tolist() for each in (mean, whole, weighted, logic, either, torch.cat(uneven), own, product)]
    return found


def overlap(folder: str, rank: int, size: int) -> tuple[bool, bool]:
    """Rank 1 comes when the call of rank 0 has returned.

    Return whether it has, and whether the operation ended while nobody waited for it.
    """
    tensor, mark = torch.ones(200_000), Path(folder, "returned")
    deadline = time.monotonic() + 60
    with world(folder, rank, size):
        dist.barrier()
        while rank == 1 and not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        has_returned = rank == 0 or mark.exists()
        future = dist.all_reduce(tensor, async_op=True).get_future()
        mark.touch()
        deadline = time.monotonic() + 60
        while not future.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        return has_returned, future.done() and tensor[0].item() == size
