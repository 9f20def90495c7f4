"""Named operations on tensors, with Horovod's signatures.

Matching: the ranks' operations meet by `name`, in whatever order they are submitted; operations without a name
are numbered per kind, so those must come in the same order on every rank. Shapes, dtypes and reductions must be
equal on every rank (an all-gather's and all-to-all's dim 0 may differ), else MismatchError is raised on every
rank, and the runtime stays usable.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from enum import IntEnum

import torch

from unidist import context
from unidist.buffer import Buffer
from unidist.communicator import ReduceOp
from unidist.errors import UsageError
from unidist.negotiation import Handle as NegotiatedHandle
from unidist.negotiation import OperationKind, Request, reducescatter_rows
from unidist_torch.memory import buffer_of


class Op(IntEnum):
    """The reductions by Horovod's names."""

    Average = 0
    Sum = 1
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Min, Max, Product = Op.Average, Op.Sum, Op.Min, Op.Max, Op.Product

_REDUCTIONS = {
    Op.Average: ReduceOp.SUM,
    Op.Sum: ReduceOp.SUM,
    Op.Min: ReduceOp.MIN,
    Op.Max: ReduceOp.MAX,
    Op.Product: ReduceOp.PRODUCT,
}


class Handle:
    """An operation under way, for `synchronize` and `poll`."""

    __slots__ = ("_copy_back", "_inner", "_output")

    def __init__(
        self, inner: NegotiatedHandle, output: Callable[[], torch.Tensor], copy_back: Callable[[], object] | None
    ) -> None:
        self._inner = inner
        self._output = output
        self._copy_back = copy_back

    def done(self) -> bool:
        """Say whether the operation has ended; never blocks."""
        return self._inner.done()

    def wait(self) -> torch.Tensor:
        """Return the result when it is there; raises what went wrong."""
        self._inner.wait()
        if self._copy_back is not None:
            copy_back, self._copy_back = self._copy_back, None
            copy_back()
        return self._output()


class _Names:
    """Numbers for operations without a name, per runtime and kind."""

    def __init__(self) -> None:
        self._owner: context.Context | None = None
        self._counters: dict[str, itertools.count[int]] = {}

    def next(self, kind: str, owner: context.Context) -> str:
        if owner is not self._owner:
            self._owner, self._counters = owner, defaultdict(lambda: itertools.count(1))
        return f"{kind}.noname.{next(self._counters[kind])}"


_names = _Names()


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return the reduction of `tensor` over all ranks; the tensor itself is not changed.

    Args:
        tensor: dense, of any shape, the same on every rank.
        average: deprecated by Horovod: True for Average, False for Sum.
        name: what ranks match by.
        op: Average (default), Sum, Min, Max or Product.
        prescale_factor: factor for the tensor before the reduction.
        postscale_factor: factor for the result. On integers the scaling is done in float64 and truncated.

    Raises:
        MismatchError: the ranks' calls differ.
        PeerLostError: a rank is gone.
    """
    return allreduce_async(
        tensor,
        average,
        name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        _background=False,
    ).wait()


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    _background: bool = True,
) -> Handle:
    """Start `allreduce` and return a handle; the tensor must not be changed until it is done."""
    source = tensor.detach().contiguous()
    target = torch.empty_like(source)
    return _allreduce(source, target, average, name, op, prescale_factor, postscale_factor, background=_background)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Like `allreduce`, but the result replaces the tensor's content; returns the tensor."""
    return allreduce_async_(
        tensor,
        average,
        name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        _background=False,
    ).wait()


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    _background: bool = True,
) -> Handle:
    """Start `allreduce_` and return a handle."""
    return _allreduce(tensor, tensor, average, name, op, prescale_factor, postscale_factor, background=_background)


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
    memory, copy_back = _staged(tensor)
    request = Request(
        name or _names.next("broadcast", runtime),
        OperationKind.BROADCAST,
        target=buffer_of(memory),
        shape=tuple(tensor.shape),
        root=root_rank,
    )
    return Handle(runtime.negotiator.submit(request, background=_background), lambda: tensor, copy_back)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    op: Op = Op.Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction over all ranks.

    Args:
        tensor: `(rows, ...)`, the same shape on every rank. Rows that do not divide go to the first ranks.
        name: what ranks match by.
        op: Average or Sum.
        prescale_factor: see `allreduce`.
        postscale_factor: see `allreduce`.
    """
    return _reducescatter(tensor, name, op, prescale_factor, postscale_factor, background=False).wait()


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    op: Op = Op.Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter` and return a handle."""
    return _reducescatter(tensor, name, op, prescale_factor, postscale_factor, background=True)


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
    runtime.negotiator.submit(Request(_names.next("barrier", runtime), OperationKind.BARRIER)).wait()


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


def synchronize(handle: Handle) -> torch.Tensor:
    """Return the result of an asynchronous operation when it is there; raises what went wrong."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Say whether an asynchronous operation has ended; never blocks."""
    return handle.done()


def reduction_of(op: Op | None, average: bool | None) -> Op:
    """Return the reduction that Horovod's two arguments ask for."""
    if op is not None and average is not None:
        raise ValueError("give op or average, not both; average is deprecated, use op")
    if op is None:
        return Op.Sum if average is False else Op.Average
    return Op(op)


def _allreduce(
    source: torch.Tensor,
    target: torch.Tensor,
    average: bool | None,
    name: str | None,
    op: Op | None,
    prescale: float,
    postscale: float,
    *,
    background: bool,
) -> Handle:
    runtime = context.current()
    reduction = reduction_of(op, average)
    scale = prescale * postscale
    if scale != 1.0 and reduction not in (Op.Average, Op.Sum):
        raise UsageError(f"prescale_factor and postscale_factor apply to Average and Sum, not to {reduction.name}")
    if reduction is Op.Average:
        scale /= runtime.topology.world_size
    in_place = source is target
    given, copy_back = _staged(target if in_place else source)
    result, from_result = (given, copy_back) if in_place else _staged(target)
    request = Request(
        name or _names.next("allreduce", runtime),
        OperationKind.ALLREDUCE,
        buffer_of(given),
        buffer_of(result),
        tuple(source.shape),
        _REDUCTIONS[reduction],
        0,
        scale,
    )
    handle = runtime.negotiator.submit(request, background=background)
    return Handle(handle, lambda: target, from_result)


def _allgather(tensor: torch.Tensor, name: str | None, *, background: bool) -> Handle:
    runtime = context.current()
    source = _host(tensor if tensor.dim() else tensor.reshape(1))
    output: list[torch.Tensor] = []
    request = Request(
        name or _names.next("allgather", runtime),
        OperationKind.ALLGATHER,
        source=buffer_of(source),
        shape=tuple(source.shape),
        allocate_output=_allocator(source, output),
    )
    handle = runtime.negotiator.submit(request, background=background)
    return Handle(handle, lambda: output[0].to(tensor.device), None)


def _reducescatter(
    tensor: torch.Tensor, name: str | None, op: Op, prescale: float, postscale: float, *, background: bool
) -> Handle:
    runtime = context.current()
    if op not in (Op.Average, Op.Sum):
        raise UsageError(f"reducescatter computes Average or Sum, not {Op(op).name}")
    if not tensor.dim():
        raise UsageError("reducescatter divides rows; a scalar has none")
    source = _host(tensor)
    size, rank = runtime.topology.world_size, runtime.topology.rank
    rows = reducescatter_rows(source.shape[0], size)[rank]
    target = torch.empty((rows, *source.shape[1:]), dtype=source.dtype)
    request = Request(
        name or _names.next("reducescatter", runtime),
        OperationKind.REDUCESCATTER,
        buffer_of(source),
        buffer_of(target),
        tuple(source.shape),
        scale=prescale * postscale / (size if op is Op.Average else 1),
    )
    handle = runtime.negotiator.submit(request, background=background)
    return Handle(handle, lambda: target.to(tensor.device), None)


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
    source = _host(tensor)
    output: list[torch.Tensor] = []
    request = Request(
        name or _names.next("alltoall", runtime),
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


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()


def _staged(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object] | None]:
    """Return a contiguous host tensor with the same content, and what brings its content back, where it is a copy."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor, None
    staged = _host(tensor)
    return staged, lambda: tensor.copy_(staged)


__all__ = [
    "Average", "Handle", "Max", "Min", "Op", "Product", "Sum", "allgather", "allgather_async", "allreduce",
    "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "poll", "recv", "reducescatter", "reducescatter_async", "send", "synchronize",
]  # fmt: skip
