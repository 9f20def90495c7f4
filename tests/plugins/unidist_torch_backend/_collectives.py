"""A table of calls of torch.distributed; the ranks carry each out over `unidist` and over gloo, and compare."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _groups import world

Group = dist.ProcessGroup
Case = Callable[[Group], list[torch.Tensor]]

REDUCED = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64,
)  # fmt: skip
MOVED = (*REDUCED, torch.bool, torch.complex64, torch.complex128)
SIZES = (1, 1000, 70_000)  # travel with the descriptor, in a few pages, through windows


def values(group: Group, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return small numbers that differ from rank to rank, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(100 * group.rank() + seed)
    if dtype is torch.bool:
        return torch.rand(*shape, generator=generator) < 0.7
    numbers = torch.randint(1, 4, shape, generator=generator)
    return numbers.to(dtype) * (1 + 2j) if dtype.is_complex else numbers.to(dtype)


def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return zeros for a result."""
    return torch.zeros(*shape, dtype=dtype)


def all_reduce(op: Any, dtype: torch.dtype, count: int) -> Case:
    def run(group: Group) -> list[torch.Tensor]:
        tensor = values(group, dtype, count)
        dist.all_reduce(tensor, op, group=group)
        return [tensor]

    return run


def all_reduce_asynchronously(group: Group) -> list[torch.Tensor]:
    tensors = [values(group, torch.float64, count, seed=count) for count in (3, 5000, 200_000, 7)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    (by_future,) = works[2].get_future().wait()
    for work in works:
        work.wait()
    return [*tensors, by_future]


def futures_in_any_order(group: Group) -> list[torch.Tensor]:
    tensors = [values(group, torch.float64, 4000, seed=number) for number in range(5)]
    futures = [dist.all_reduce(tensor, group=group, async_op=True).get_future() for tensor in tensors]
    doubled = [future.then(lambda done: done.value()[0] * 2) for future in futures]
    return [future.wait() for future in reversed(doubled)]


def all_reduce_before_a_message(group: Group) -> list[torch.Tensor]:
    """Each rank issues a large all-reduce before it lets the next rank do so: issuing must not wait for the peers."""
    tensor, token = values(group, torch.float32, 400_000), torch.zeros(1)
    rank = dist.get_rank(group)
    if rank:
        dist.recv(token, group=group, group_src=rank - 1)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    if rank + 1 < dist.get_world_size(group):
        dist.send(token, group=group, group_dst=rank + 1)
    work.wait()
    return [tensor]


def all_reduce_transposed(group: Group) -> list[torch.Tensor]:
    """Memory that is not contiguous gloo refuses: here it gets a copy."""
    tensor = values(group, torch.float32, 30, 50).t()
    if group.name() == "gloo":
        tensor = tensor.contiguous()
    dist.all_reduce(tensor, group=group)
    return [tensor]


def all_reduce_coalesced(group: Group) -> list[torch.Tensor]:
    tensors = [values(group, torch.float32, count, seed=count) for count in (1, 3000, 17)]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def all_reduce_sparse(group: Group) -> list[torch.Tensor]:
    rank = group.rank()
    tensor = torch.sparse_coo_tensor([[rank, rank + 2, 1]], [[1.0, 2], [3, 4], [5, 6]], (8, 2)).coalesce()
    dist.all_reduce(tensor, group=group)
    return [tensor.to_dense()]


def broadcast(dtype: torch.dtype, count: int, root: int) -> Case:
    def run(group: Group) -> list[torch.Tensor]:
        tensor = values(group, dtype, count)
        dist.broadcast(tensor, group_src=root, group=group)
        return [tensor]

    return run


def reduce(op: Any, count: int, root: int) -> Case:
    def run(group: Group) -> list[torch.Tensor]:
        tensor = values(group, torch.int64, count)
        dist.reduce(tensor, group_dst=root, op=op, group=group)
        return [tensor] if group.rank() == root else []

    return run


def all_gather(dtype: torch.dtype, count: int) -> Case:
    def run(group: Group) -> list[torch.Tensor]:
        outputs = [empty(dtype, count) for _ in range(group.size())]
        dist.all_gather(outputs, values(group, dtype, count), group=group)
        return outputs

    return run


def all_gather_into_tensor(dtype: torch.dtype, count: int) -> Case:
    def run(group: Group) -> list[torch.Tensor]:
        output = empty(dtype, count * group.size())
        dist.all_gather_into_tensor(output, values(group, dtype, count), group=group)
        return [output]

    return run


def all_gather_in_place(group: Group) -> list[torch.Tensor]:
    """As FSDP2 does: the input is this rank's part of the output."""
    output = empty(torch.float32, 6000 * group.size())
    own = output.narrow(0, 6000 * group.rank(), 6000)
    own.copy_(values(group, torch.float32, 6000))
    dist.all_gather_into_tensor(output, own, group=group)
    return [output]


def reduce_scatter(op: Any, count: int) -> Case:
    def run(group: Group) -> list[torch.Tensor]:
        output = empty(torch.int64, count)
        inputs = [values(group, torch.int64, count, seed=rank) for rank in range(group.size())]
        dist.reduce_scatter(output, inputs, op, group=group)
        return [output]

    return run


def reduce_scatter_tensor(dtype: torch.dtype, count: int) -> Case:
    def run(group: Group) -> list[torch.Tensor]:
        output = empty(dtype, count)
        dist.reduce_scatter_tensor(output, values(group, dtype, count * group.size()), group=group)
        return [output]

    return run


def all_to_all_single(dtype: torch.dtype, rows: int) -> Case:
    def run(group: Group) -> list[torch.Tensor]:
        output = empty(dtype, rows * group.size(), 3)
        dist.all_to_all_single(output, values(group, dtype, rows * group.size(), 3), group=group)
        return [output]

    return run


def all_to_all_split(group: Group) -> list[torch.Tensor]:
    rank, size = group.rank(), group.size()
    sent = [(rank + 2 * other) % 4 for other in range(size)]  # some are zero
    received = [(other + 2 * rank) % 4 for other in range(size)]
    output = empty(torch.float32, sum(received), 500)
    dist.all_to_all_single(output, values(group, torch.float32, sum(sent), 500), received, sent, group=group)
    return [output]


def gather(dtype: torch.dtype, count: int, root: int) -> Case:
    def run(group: Group) -> list[torch.Tensor]:
        is_root = group.rank() == root
        outputs = [empty(dtype, count) for _ in range(group.size())] if is_root else None
        dist.gather(values(group, dtype, count), outputs, group_dst=root, group=group)
        return outputs or []

    return run


def scatter(dtype: torch.dtype, count: int, root: int) -> Case:
    def run(group: Group) -> list[torch.Tensor]:
        output = empty(dtype, count)
        is_root = group.rank() == root
        inputs = [values(group, dtype, count, seed=rank) for rank in range(group.size())] if is_root else None
        dist.scatter(output, inputs, group_src=root, group=group)
        return [output]

    return run


def ring(dtype: torch.dtype, count: int) -> Case:
    def run(group: Group) -> list[torch.Tensor]:
        rank, size = group.rank(), group.size()
        received = empty(dtype, count)
        operations = [
            dist.P2POp(dist.isend, values(group, dtype, count), group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [received]

    return run


def tags(group: Group) -> list[torch.Tensor]:
    """Messages are received in another order than they were sent in: the tag says which is meant."""
    counts = (4, 9000, 2)
    received = [empty(torch.float32, count) for count in counts]
    if group.rank() == 0:
        works = [
            dist.isend(values(group, torch.float32, count), group_dst=1, tag=tag, group=group)
            for tag, count in enumerate(counts)
        ]
        for work in works:
            work.wait()
    if group.rank() == 1:
        for tag in (2, 0, 1):
            dist.recv(received[tag], group_src=0, tag=tag, group=group)
    return received


def any_source(group: Group) -> list[torch.Tensor]:
    """Rank 0 takes one message of each other rank, in whichever order they come."""
    if group.rank():
        dist.send(torch.full((3,), float(group.rank())), group_dst=0, group=group)
        return []
    received = [torch.zeros(3) for _ in range(group.size() - 1)]
    senders = [dist.recv(each, group=group) for each in received]
    assert [int(each[0]) for each in received] == [dist.get_group_rank(group, sender) for sender in senders]
    return [torch.stack(received).sum(0)]


def objects(group: Group) -> list[torch.Tensor]:
    rank, size = group.rank(), group.size()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * 1000 * rank}, group=group)
    assert [each["rank"] for each in everyone] == list(range(size))
    told = [f"from {rank}", rank]
    dist.broadcast_object_list(told, group_src=size - 1, group=group)
    assert told == [f"from {size - 1}", size - 1]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {each}" for each in range(size)], group_src=0, group=group)
    assert mine == [f"for {rank}"]
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank * 10, gathered, group_dst=0, group=group)
    assert gathered is None or gathered == [each * 10 for each in range(size)]
    if rank == 0:
        dist.send_object_list(["a", {"b": 2}], group_dst=1, group=group)
    if rank == 1:
        got: list[Any] = [None, None]
        dist.recv_object_list(got, group_src=0, group=group)
        assert got == ["a", {"b": 2}]
    return []


def functional(group: Group) -> list[torch.Tensor]:
    from torch.distributed import _functional_collectives as collectives

    size = group.size()
    results = [
        collectives.all_reduce(values(group, torch.float32, 3000), "sum", group),
        collectives.all_gather_tensor(values(group, torch.float32, 30, 7), 0, group),
        collectives.reduce_scatter_tensor(values(group, torch.float32, 30 * size, 7), "sum", 0, group),
        collectives.all_to_all_single(values(group, torch.float32, 3 * size, 7), None, None, group),
        collectives.broadcast(values(group, torch.float32, 3000), 0, group),
        *collectives.all_reduce_coalesced(
            [values(group, torch.float32, 5), values(group, torch.float32, 9)], "sum", group
        ),
    ]
    return [result.clone() for result in results]


def coalescing(group: Group) -> list[torch.Tensor]:
    tensors = [values(group, torch.float64, count, seed=count) for count in (5, 4000)]
    with dist.distributed_c10d._coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    return tensors


def barriers(group: Group) -> list[torch.Tensor]:
    dist.barrier(group)
    dist.barrier(group, async_op=True).wait()
    group.monitored_barrier()
    return []


def table() -> dict[str, Case]:
    """Return every call, by name."""
    ops = {
        "sum": dist.ReduceOp.SUM,
        "product": dist.ReduceOp.PRODUCT,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
    }
    bitwise = {"band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR}
    cases: dict[str, Case] = {
        "all_reduce async": all_reduce_asynchronously,
        "all_reduce before a message": all_reduce_before_a_message,
        "futures": futures_in_any_order,
        "all_reduce transposed": all_reduce_transposed,
        "all_reduce_coalesced": all_reduce_coalesced,
        "all_reduce sparse": all_reduce_sparse,
        "all_gather in place": all_gather_in_place,
        "all_to_all split": all_to_all_split,
        "tags": tags,
        "any source": any_source,
        "objects": objects,
        "functional": functional,
        "coalescing": coalescing,
        "barriers": barriers,
    }
    for name, op in ops.items():
        for dtype in REDUCED:
            for count in SIZES:
                cases[f"all_reduce {name} {dtype} {count}"] = all_reduce(op, dtype, count)
    for name, op in bitwise.items():
        for dtype in (torch.int32, torch.uint8, torch.int64):
            cases[f"all_reduce {name} {dtype}"] = all_reduce(op, dtype, 3000)
        cases[f"reduce {name}"] = reduce(op, 100, 1)
        cases[f"reduce_scatter {name}"] = reduce_scatter(op, 100)
    cases["all_reduce sum complex"] = all_reduce(dist.ReduceOp.SUM, torch.complex64, 1000)
    for count in SIZES:
        for name, op in ops.items():
            cases[f"reduce {name} {count}"] = reduce(op, count, 1)
            cases[f"reduce_scatter {name} {count}"] = reduce_scatter(op, count)
        for dtype in MOVED:
            for root in (0, 1):
                cases[f"broadcast {dtype} {count} {root}"] = broadcast(dtype, count, root)
                cases[f"gather {dtype} {count} {root}"] = gather(dtype, count, root)
                cases[f"scatter {dtype} {count} {root}"] = scatter(dtype, count, root)
            cases[f"all_gather {dtype} {count}"] = all_gather(dtype, count)
            cases[f"all_gather_into_tensor {dtype} {count}"] = all_gather_into_tensor(dtype, count)
            cases[f"all_to_all_single {dtype} {count}"] = all_to_all_single(dtype, count)
            cases[f"ring {dtype} {count}"] = ring(dtype, count)
        for dtype in REDUCED:
            cases[f"reduce_scatter_tensor {dtype} {count}"] = reduce_scatter_tensor(dtype, count)
    return cases


def compare(folder: str, rank: int, size: int) -> dict[str, str]:
    """Carry out the table with both backends; return the calls whose results differ, and how."""
    differences = {}
    cases = table()
    with world(folder, rank, size), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, about older names and sparse tensors
        ours = dist.group.WORLD
        theirs = dist.new_group(backend="gloo")
        assert ours is not None
        for name, case in cases.items():
            try:
                found = case(ours)
            except Exception as exc:
                raise AssertionError(f"{name}: {exc}") from exc
            for mine, other in zip(found, _expected(name, cases, theirs), strict=True):
                if mine.dtype != other.dtype or not torch.equal(mine, other):
                    differences[name] = f"{mine.flatten()[:4]} instead of {other.flatten()[:4]}"
    return differences


def _expected(name: str, cases: dict[str, Case], gloo: Group) -> list[torch.Tensor]:
    """Return the result of a call over gloo. It refuses some moves of complex numbers: those of the real ones then."""
    if "complex" not in name or name.startswith("all_reduce"):
        return cases[name](gloo)
    dtype = torch.complex64 if "complex64" in name else torch.complex128
    return [real.to(dtype) * (1 + 2j) for real in cases[name.replace(str(dtype), "torch.float64")](gloo)]
