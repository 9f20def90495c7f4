"""MPI through mpi4py, as a script calls it: blocking operations on COMM_WORLD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI
from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp
from unidist.errors import ConfigurationError, UsageError
from unidist_bench.collectives import Collective
from unidist_bench.measurement.interface import MeasuredCall, Side

VERSION = MPI.Get_library_version().partition(",")[0].strip("\0 ")
_TYPES = {
    DType.BOOL: MPI.C_BOOL,
    DType.UINT8: MPI.UINT8_T,
    DType.INT8: MPI.INT8_T,
    DType.UINT16: MPI.UINT16_T,
    DType.INT16: MPI.INT16_T,
    DType.UINT32: MPI.UINT32_T,
    DType.INT32: MPI.INT32_T,
    DType.UINT64: MPI.UINT64_T,
    DType.INT64: MPI.INT64_T,
    DType.FLOAT32: MPI.FLOAT,
    DType.FLOAT64: MPI.DOUBLE,
    DType.COMPLEX64: MPI.C_FLOAT_COMPLEX,
    DType.COMPLEX128: MPI.C_DOUBLE_COMPLEX,
}
_OPS = {ReduceOp.SUM: MPI.SUM, ReduceOp.PRODUCT: MPI.PROD, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX}
_TRUTH = {ReduceOp.SUM: MPI.LOR, ReduceOp.PRODUCT: MPI.LAND, ReduceOp.MIN: MPI.LAND, ReduceOp.MAX: MPI.LOR}


class MpiSide(Side):
    """A duplicate of MPI's communicator of all processes.

    Args:
        communicator: over all ranks.

    Raises:
        ConfigurationError: these processes are not all those of one mpirun.
    """

    def __init__(self, communicator: Communicator) -> None:
        found, wanted = (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size), (communicator.rank, communicator.size)
        if found != wanted:
            raise ConfigurationError(
                f"MPI says that rank {wanted[0]} of {wanted[1]} is {found[0]} of {found[1]}: mpirun has to start the "
                "ranks; leave --launcher out, or give --launcher mpi"
            )
        self._comm = MPI.COMM_WORLD.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)

    @override
    def operation(self, call: MeasuredCall) -> Callable[[], object]:
        comm, target = self._comm, _message(call.target)
        source: Any = MPI.IN_PLACE if call.in_place else _message(call.source)
        op = (_TRUTH if call.source.dtype is DType.BOOL else _OPS)[call.op]
        match call.collective:
            case Collective.ALLREDUCE:
                return lambda: comm.Allreduce(source, target, op)
            case Collective.ALLGATHER:
                pieces = _message(call.target, call.size)
                return lambda: comm.Allgather(source, pieces)
            case Collective.REDUCESCATTER:
                # In place, MPI reads the whole of the receive buffer, and leaves the piece at its beginning.
                if call.in_place:
                    raise UsageError(
                        "MPI leaves the piece of an in-place reduce-scatter elsewhere; give --out-of-place"
                    )
                pieces = _message(call.source, call.size)
                return lambda: comm.Reduce_scatter_block(pieces, target, op)
            case Collective.BROADCAST:
                return lambda: comm.Bcast(target, call.root)
            case Collective.ALLTOALL:
                given, taken = _message(call.source, call.size), _message(call.target, call.size)
                return lambda: comm.Alltoall(given, taken)
            case Collective.BARRIER:
                return comm.Barrier
            case Collective.SENDRECV:
                return _messages(comm, call)

    @override
    def close(self) -> None:
        self._comm.Free()


def _messages(comm: MPI.Intracomm, call: MeasuredCall) -> Callable[[], object]:
    partner, source, target = call.partner, _message(call.source), _message(call.target)
    if partner is None:
        return lambda: None

    def first() -> None:
        comm.Send(source, partner)
        comm.Recv(target, partner)

    def last() -> None:
        comm.Recv(target, partner)
        comm.Send(source, partner)

    return first if call.rank == 0 else last


def _message(buffer: Buffer, num_pieces: int = 1) -> tuple[Any, int, MPI.Datatype]:
    """Return a buffer as mpi4py takes it; where it has a piece for each rank, the count is that of a piece."""
    if buffer.dtype not in _TYPES:
        raise UsageError(f"MPI has no type for {buffer.dtype}")
    return MPI.buffer.fromaddress(buffer.address, buffer.nbytes), buffer.count // num_pieces, _TYPES[buffer.dtype]
