"""Moving tensors by name: all-gather, broadcast, all-to-all; barrier, join; and send and recv. See `operations`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unidist.buffer import Buffer
from unidist.errors import OperationError
from unidist.horovod_api.gather_advice import GatherAdvice
from unidist.horovod_api.reduce_ops import Op, checked_op
from unidist.horovod_api.scope import scope_of
from unidist.negotiation import OperationKind, Request
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.runtime import context
from unidist_torch.memory import buffer_of
from unidist_torch.operations import differentiable
from unidist_torch.operations.handles import AnyHandle, GroupHandle, Handle, SparseHandle
from unidist_torch.operations.places import StreamOrder, place, place_in, stream_order
from unidist_torch.operations.reductions import Average, allreduce, grouped_allreduce

# All-gather


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensors of all ranks concatenated along dim 0, in rank order. Dim 0 may differ between ranks.

    Differentiable; the gradient is averaged over the ranks, as Horovod's is.

    Args:
        tensor: all dims but the first are equal on every rank; a scalar counts as one row.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.
    """

    def run(values: torch.Tensor) -> torch.Tensor:
        return _allgather(values, name, process_set, background=False).wait()

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        context.current().owned(GatherAdvice).give()
        return _own_rows(allreduce(gradient, op=Average, process_set=process_set), tensor, process_set)

    return differentiable.apply(tensor, run, backward)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Start `allgather` and return a handle. Not differentiable, like every asynchronous form."""
    return _allgather(tensor, name, process_set, background=True)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Return the all-gathers of several tensors, which are submitted together. Differentiable."""

    def run(*values: torch.Tensor) -> Sequence[torch.Tensor]:
        return grouped_allgather_async(values, name, process_set).wait()

    def backward(*gradients: torch.Tensor) -> list[torch.Tensor]:
        context.current().owned(GatherAdvice).give()
        reduced = grouped_allreduce(gradients, op=Average, process_set=process_set)
        return [_own_rows(each, tensor, process_set) for each, tensor in zip(reduced, tensors, strict=True)]

    return tuple(differentiable.apply_group(tensors, run, backward))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Start `grouped_allgather` and return a handle."""
    name = scope_of(process_set).name("grouped_allgather", name)
    return GroupHandle(
        [_allgather(tensor, f"{name}.{index}", process_set, background=True) for index, tensor in enumerate(tensors)]
    )


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: Op, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Start the reduction of a sparse tensor, by gathering indices and values; equal rows are not yet summed.

    Args:
        tensor: sparse COO, of one shape on every rank.
        name: by which the ranks match the operation.
        op: Average or Sum.
        process_set: the ranks that take part.

    Returns:
        A handle that may also be called, as Horovod's is.
    """
    if op not in (Op.Average, Op.Sum):
        raise OperationError(f"sparse_allreduce_async computes Average or Sum, not {checked_op(op).name}")
    scope = scope_of(process_set)
    name = scope.name("sparse_allreduce", name)
    indices = tensor._indices().t().contiguous()

    def combine(parts: list[torch.Tensor]) -> torch.Tensor:
        values = parts[1] / scope.size if op is Op.Average else parts[1]
        return torch.sparse_coo_tensor(parts[0].t(), values, tensor.shape)

    return SparseHandle(
        [
            _allgather(indices, f"{name}.indices", process_set, background=True),
            _allgather(tensor._values(), f"{name}.values", process_set, background=True),
        ],
        combine,
    )


# Broadcast


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return rank `root_rank`'s tensor on every rank; the tensor itself is not changed. Differentiable.

    Args:
        tensor: of the same shape on every rank.
        root_rank: a world rank, also where a process set is given.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.
    """

    def run(values: torch.Tensor) -> torch.Tensor:
        return start_broadcast(_copy_of(values), root_rank, name, process_set, background=False).wait()

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        averaged = allreduce(gradient, op=Average, process_set=process_set)
        return averaged if context.current().topology.rank == root_rank else torch.zeros_like(averaged)

    return differentiable.apply(tensor, run, backward)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Start `broadcast` and return a handle."""
    return start_broadcast(_copy_of(tensor), root_rank, name, process_set, background=True)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Replace the tensor's content by rank `root_rank`'s; returns the tensor."""
    return start_broadcast(tensor, root_rank, name, process_set, background=False).wait()


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> AnyHandle:
    """Start `broadcast_` and return a handle."""
    return start_broadcast(tensor, root_rank, name, process_set, background=True)


# All-to-all


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows to rank i and return the rows received, in rank order. Differentiable.

    Args:
        tensor: `(rows, ...)`; all dims but the first equal on every rank.
        splits: rows for each rank, whole numbers that add up to dim 0; rows behind their sum stay. Default: equal
            shares.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.

    Returns:
        The rows received; with `splits` also how many came from each rank, `(size,)` int32, as Horovod does.
    """
    received = torch.empty(0, dtype=torch.int32)

    def run(values: torch.Tensor) -> torch.Tensor:
        nonlocal received
        output, received = _alltoall(values, splits, name, process_set, background=False).wait()
        return output

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        returned: torch.Tensor = alltoall(gradient, received, process_set=process_set)[0]
        kept = tensor.shape[0] - returned.shape[0]
        return torch.cat([returned, returned.new_zeros(kept, *returned.shape[1:])]) if kept else returned

    output = differentiable.apply(tensor, run, backward)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Start `alltoall` and return a handle; its result is always (rows received, rows from each rank)."""
    return _alltoall(tensor, splits, name, process_set, background=True)


# Without data, and without names


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it."""
    scope = scope_of(process_set)
    scope.submit(Request(scope.name("barrier", None), OperationKind.BARRIER), background=False).wait()


def join(device: int = -1) -> int:
    """Report that this rank has run out of data, and return when every rank has; returns the last one to say so.

    Until then it takes part with zeros in what the others do: sums and averages by name, and the updates of
    optimizers (averages still divide by the number of all ranks, as in Horovod). Other operations that
    they start end there with MismatchError.

    Args:
        device: accepted for Horovod's sake; zeros are made where they are needed.
    """
    return context.current().join()


def send(tensor: torch.Tensor, dst: int) -> None:
    """Send a tensor to rank `dst`, which calls `recv`. Returns when the tensor may be changed again."""
    context.current().world.send(buffer_of(tensor.detach().cpu().contiguous()), to=dst).wait()


def recv(tensor: torch.Tensor, src: int) -> torch.Tensor:
    """Fill the tensor with the next message of rank `src`, of the same size and dtype; returns the tensor."""
    is_plain = tensor.is_cpu and tensor.is_contiguous()
    memory = tensor if is_plain else torch.empty(tensor.shape, dtype=tensor.dtype)
    context.current().world.recv(buffer_of(memory), source=src).wait()
    if memory is not tensor:
        tensor.copy_(memory)
    return tensor


# Implementation


def _allgather(tensor: torch.Tensor, name: str | None, process_set: ProcessSet, *, background: bool) -> Handle:
    scope = scope_of(process_set)
    source = place(tensor if tensor.dim() else tensor.reshape(1), scope)
    output: list[torch.Tensor] = []
    order = stream_order(source)
    request = Request(
        scope.name("allgather", name),
        OperationKind.ALLGATHER,
        source=buffer_of(source),
        shape=tuple(source.shape),
        allocate_output=_allocator(source, output, order),
        order=order,
    )
    return Handle(scope.submit(request, background=background), lambda: output[0].to(tensor.device), order=order)


def _own_rows(gathered: torch.Tensor, tensor: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """Return the rows of a gathered tensor that came from this rank, in the shape of `tensor`."""
    rows = allgather(torch.tensor([tensor.shape[0] if tensor.dim() else 1]), process_set=process_set)
    start = int(rows[: scope_of(process_set).rank].sum())
    return gathered.narrow(0, start, tensor.shape[0] if tensor.dim() else 1).reshape(tensor.shape)


def start_broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, background: bool
) -> Handle:
    """Start a broadcast in place; without `background` it moves while somebody waits."""
    scope = scope_of(process_set)
    memory, copy_back = place_in(tensor, scope)
    order = stream_order(memory)
    request = Request(
        scope.name("broadcast", name),
        OperationKind.BROADCAST,
        target=buffer_of(memory),
        shape=tuple(tensor.shape),
        root=scope.root(root_rank),
        order=order,
    )
    return Handle(scope.submit(request, background=background), lambda: tensor, copy_back, order=order)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
    *,
    background: bool,
) -> Handle:
    scope = scope_of(process_set)
    if not tensor.dim():
        raise OperationError("alltoall divides rows; a scalar has none")
    if splits is not None:
        rows = _rows_of(splits)
    elif tensor.shape[0] % scope.size:
        raise OperationError(f"alltoall: {tensor.shape[0]} rows do not divide over {scope.size} ranks; pass splits")
    else:
        rows = [tensor.shape[0] // scope.size] * scope.size
    if 0 <= sum(rows) < tensor.shape[0]:
        tensor = tensor[: sum(rows)]  # the others stay here, as in Horovod
    source = place(tensor, scope)
    order = stream_order(source)
    output: list[torch.Tensor] = []
    request = Request(
        scope.name("alltoall", name),
        OperationKind.ALLTOALL,
        source=buffer_of(source),
        shape=tuple(source.shape),
        splits=tuple(rows),
        allocate_output=_allocator(source, output, order),
        order=order,
    )
    handle = scope.submit(request, background=background)

    def result() -> tuple[torch.Tensor, torch.Tensor]:
        return output[0].to(tensor.device), torch.tensor(handle.rows, dtype=torch.int32)

    return Handle(handle, result, order=order)


def _rows_of(splits: torch.Tensor | Sequence[int]) -> list[int]:
    """Return the numbers of rows for each rank.

    Raises:
        OperationError: they are not whole numbers in one row.
    """
    if isinstance(splits, torch.Tensor) and not splits.is_floating_point() and splits.dim() == 1:
        return [int(count) for count in splits.tolist()]
    try:
        rows = [] if isinstance(splits, torch.Tensor | str | bytes) else [int(count) for count in splits]
        if rows == list(splits):
            return rows
    except (TypeError, ValueError):
        pass
    raise OperationError(f"alltoall: splits={splits!r}; give a whole number of rows for each rank, in a list or tensor")


def _allocator(
    source: torch.Tensor, output: list[torch.Tensor], order: StreamOrder | None
) -> Callable[[tuple[int, ...]], Buffer]:
    def allocate(rows: tuple[int, ...]) -> Buffer:
        output.append(torch.empty((sum(rows), *source.shape[1:]), dtype=source.dtype, device=source.device))
        if order is not None:
            order.made(output[0])
        return buffer_of(output[0])

    return allocate
