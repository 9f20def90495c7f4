"""unidist's two sides: the plain communicator, and named operations, which ranks negotiate."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from unidist.communicator import Communicator, MessageOrder
from unidist.errors import UsageError
from unidist.negotiation import NamedOperations, OperationKind, Request
from unidist_bench.collectives import Collective
from unidist_bench.measurement.interface import MeasuredCall, Side


class CommunicatorSide(Side):
    """A communicator's own operations, each waited for.

    Args:
        communicator: over all ranks; closed with this.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    @override
    def operation(self, call: MeasuredCall) -> Callable[[], object]:
        comm, source, target = self._communicator, call.source, call.target
        if source.dtype not in comm.capabilities.dtypes:
            raise UsageError(f"{comm.description} does not move {source.dtype}")
        match call.collective:
            case Collective.ALLREDUCE:
                return lambda: comm.allreduce(source, target, op=call.op).wait()
            case Collective.ALLGATHER:
                return lambda: comm.allgather(source, target).wait()
            case Collective.REDUCESCATTER:
                return lambda: comm.reducescatter(source, target, op=call.op).wait()
            case Collective.BROADCAST:
                return lambda: comm.broadcast(target, root=call.root).wait()
            case Collective.ALLTOALL:
                counts = [source.count // call.size] * call.size
                return lambda: comm.alltoall(source, target, send_counts=counts, receive_counts=counts).wait()
            case Collective.BARRIER:
                return lambda: comm.barrier().wait()
            case Collective.SENDRECV:
                return self._messages(call)

    def _messages(self, call: MeasuredCall) -> Callable[[], object]:
        comm, partner = self._communicator, call.partner
        if partner is None:
            return lambda: None
        if comm.capabilities.messages is MessageOrder.NONE:
            raise UsageError(f"{comm.description} cannot send and receive")

        def send() -> None:
            comm.send(call.source, to=partner).wait()

        def receive() -> None:
            comm.recv(call.target, source=partner).wait()

        return _in_turn(send, receive) if call.rank == 0 else _in_turn(receive, send)

    @override
    def close(self) -> None:
        self._communicator.close()


class NamedSide(Side):
    """Named operations: a request is made and run each time, as adapters do.

    Args:
        operations: over all ranks.
    """

    def __init__(self, operations: NamedOperations) -> None:
        self._operations = operations

    @override
    def operation(self, call: MeasuredCall) -> Callable[[], object]:
        make, run = self._request(call), self._operations.run
        return lambda: run(make())

    def _request(self, call: MeasuredCall) -> Callable[[], Request]:
        source, target = call.source, call.target
        name, shape = f"bench {call.collective}", (source.count,)
        match call.collective:
            case Collective.ALLREDUCE:
                return lambda: Request(name, OperationKind.ALLREDUCE, source, target, shape, call.op)
            case Collective.ALLGATHER:
                return lambda: Request(
                    name, OperationKind.ALLGATHER, source, shape=shape, allocate_output=lambda rows: target
                )
            case Collective.REDUCESCATTER:
                return lambda: Request(name, OperationKind.REDUCESCATTER, source, target, shape, call.op)
            case Collective.BROADCAST:
                return lambda: Request(name, OperationKind.BROADCAST, target=target, shape=shape, root=call.root)
            case Collective.ALLTOALL:
                splits = (source.count // call.size,) * call.size
                return lambda: Request(
                    *(name, OperationKind.ALLTOALL, source),
                    shape=shape,
                    splits=splits,
                    allocate_output=lambda rows: target,
                )
            case Collective.BARRIER:
                return lambda: Request(name, OperationKind.BARRIER)
            case Collective.SENDRECV:
                raise UsageError("messages have no names; leave --named out")

    @override
    def close(self) -> None:
        """Leave the operations to the runtime, whose they are."""


def _in_turn(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], object]:
    def both() -> None:
        first()
        second()

    return both
