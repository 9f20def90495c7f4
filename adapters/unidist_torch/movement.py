"""Moving tensors by name: all-gather, broadcast, all-to-all, barrier; and send and recv. See `operations`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from unidist import context
from unidist.buffer import Buffer
from unidist.errors import UsageError
from unidist.negotiation import OperationKind, Request
from unidist_torch.handles import Handle, host_copy, names, staged
from unidist_torch.memory import buffer_of


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the tensors of all ranks concatenated along dim 0, in rank order. Dim 0 may differ between ranks."""
    return _allgather(tensor, name, background=False).wait()


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle:
    """Start `allgather` and return a handle."""
    return _allgather(tensor, name, background=True)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return rank `root_rank`'s tensor on every rank; the tensor itself is not changed."""
    return broadcast_async(tensor, root_rank, name, _background=False).wait()


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, *, _background: bool = True
) -> Handle:
    """Start `broadcast` and return a handle."""
    return broadcast_async_(tensor.detach().clone().contiguous(), root_rank, name, _background=_background)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Replace the tensor's content by rank `root_rank`'s; returns the tensor."""
    return broadcast_async_(tensor, root_rank, name, _background=False).wait()


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, *, _background: bool = True
) -> Handle:
    """Start `broadcast_` and return a handle."""
    runtime = context.current()
    memory, copy_back = staged(tensor)
    request = Request(
        name or names.next("broadcast", runtime),
        OperationKind.BROADCAST,
        target=buffer_of(memory),
        shape=tuple(tensor.shape),
        root=root_rank,
    )
    return Handle(runtime.negotiator.submit(request, background=_background), lambda: tensor, copy_back)


def alltoall(
    tensor: torch.Tensor, splits: torch.Tensor | list[int] | None = None, name: str | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send `splits[i]` rows to rank i and return the rows received, in rank order.

    Args:
        tensor: `(rows, ...)`; all dims but the first equal on every rank.
        splits: rows for each rank, adding up to dim 0; default: equal shares.
        name: what ranks match by.

    Returns:
        The rows received; with `splits` also how many came from each rank, `(size,)` int32, as Horovod does.
    """
    output, rows = _alltoall(tensor, splits, name)
    return output if splits is None else (output, rows)


def barrier() -> None:
    """Return when every rank has called it."""
    runtime = context.current()
    runtime.negotiator.submit(Request(names.next("barrier", runtime), OperationKind.BARRIER)).wait()


def send(tensor: torch.Tensor, dst: int) -> None:
    """Send a tensor to rank `dst`, which calls `recv`. Returns when the tensor may be changed again."""
    context.current().world.send(buffer_of(tensor.detach().contiguous()), to=dst).wait()


def recv(tensor: torch.Tensor, src: int) -> torch.Tensor:
    """Fill the tensor with the next message of rank `src`, of the same size and dtype; returns the tensor."""
    memory = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    context.current().world.recv(buffer_of(memory), source=src).wait()
    if memory is not tensor:
        tensor.copy_(memory)
    return tensor


def _allgather(tensor: torch.Tensor, name: str | None, *, background: bool) -> Handle:
    runtime = context.current()
    source = host_copy(tensor if tensor.dim() else tensor.reshape(1))
    output: list[torch.Tensor] = []
    request = Request(
        name or names.next("allgather", runtime),
        OperationKind.ALLGATHER,
        source=buffer_of(source),
        shape=tuple(source.shape),
        allocate_output=_allocator(source, output),
    )
    handle = runtime.negotiator.submit(request, background=background)
    return Handle(handle, lambda: output[0].to(tensor.device), None)


def _alltoall(
    tensor: torch.Tensor, splits: torch.Tensor | list[int] | None, name: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    runtime = context.current()
    size = runtime.topology.world_size
    if not tensor.dim():
        raise UsageError("alltoall divides rows; a scalar has none")
    if splits is None:
        if tensor.shape[0] % size:
            raise UsageError(f"alltoall: {tensor.shape[0]} rows do not divide over {size} ranks; pass splits")
        rows = [tensor.shape[0] // size] * size
    else:
        rows = [int(count) for count in splits]
    source = host_copy(tensor)
    output: list[torch.Tensor] = []
    request = Request(
        name or names.next("alltoall", runtime),
        OperationKind.ALLTOALL,
        source=buffer_of(source),
        shape=tuple(source.shape),
        splits=tuple(rows),
        allocate_output=_allocator(source, output),
    )
    handle = runtime.negotiator.submit(request)
    handle.wait()
    return output[0].to(tensor.device), torch.tensor(handle.rows, dtype=torch.int32)


def _allocator(source: torch.Tensor, output: list[torch.Tensor]) -> Callable[[tuple[int, ...]], Buffer]:
    def allocate(rows: tuple[int, ...]) -> Buffer:
        output.append(torch.empty((sum(rows), *source.shape[1:]), dtype=source.dtype))
        return buffer_of(output[0])

    return allocate
