"""gloo through torch.distributed, as a script calls it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from typing_extensions import override

from unidist.buffer import Buffer
from unidist.communicator import Communicator, ReduceOp
from unidist.negotiation import gather_objects
from unidist_bench.collectives import Collective
from unidist_bench.measurement.interface import MeasuredCall, Side

VERSION = f"torch {torch.__version__}"
_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
}
# Their names since PyTorch 2.13, which warns of the older ones.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class GlooSide(Side):
    """The default group of torch.distributed. It reduces in place; out of place, a copy comes before.

    Args:
        communicator: over all ranks, by which they find each other.
        address: at which the other ranks reach this one.
    """

    def __init__(self, communicator: Communicator, address: str) -> None:
        torch.set_num_threads(1)
        if interface := _interface(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        listening = None
        if communicator.rank == 0:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listening = socket.create_server((address, 0), family=family, backlog=1024)
            listening.setblocking(False)
        port = 0 if listening is None else listening.getsockname()[1]
        host, port = gather_objects(communicator, (address, port))[0]
        store = TCPStore(
            host,
            port,
            communicator.size,
            is_master=listening is not None,
            timeout=min(communicator.timeout, timedelta(minutes=5)),
            wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )
        dist.init_process_group(
            "gloo", store=store, rank=communicator.rank, world_size=communicator.size, timeout=communicator.timeout
        )

    @override
    def operation(self, call: MeasuredCall) -> Callable[[], object]:
        source, target = _tensor(call.source), _tensor(call.target)
        in_place, reduction = call.in_place, _OPS[call.op]
        match call.collective:
            case Collective.ALLREDUCE if in_place:
                return lambda: dist.all_reduce(target, reduction)
            case Collective.ALLREDUCE:
                return lambda: dist.all_reduce(target.copy_(source), reduction)
            case Collective.ALLGATHER:
                return lambda: _all_gather(target, source)
            case Collective.REDUCESCATTER:
                return lambda: _reduce_scatter(target, source, reduction)
            case Collective.BROADCAST:
                return lambda: dist.broadcast(target, call.root)
            case Collective.ALLTOALL:
                return lambda: dist.all_to_all_single(target, source)
            case Collective.BARRIER:
                return lambda: dist.barrier()
            case Collective.SENDRECV:
                return _messages(call, source, target)

    @override
    def close(self) -> None:
        dist.destroy_process_group()


def _messages(call: MeasuredCall, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    partner = call.partner
    if partner is None:
        return lambda: None

    def first() -> None:
        dist.send(source, partner)
        dist.recv(target, partner)

    def last() -> None:
        dist.recv(target, partner)
        dist.send(source, partner)

    return first if call.rank == 0 else last


def _tensor(buffer: Buffer) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, buffer.dtype)
    if not buffer.count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(buffer.bytes(), dtype=dtype)


def _interface(address: str) -> str | None:
    """Return the network interface that has an address; None if none has."""
    for name, items in psutil.net_if_addrs().items():
        if any(item.address.partition("%")[0] == address for item in items):
            return name
    return None
