"""Exchanging Python objects by name: pickled on one side, unpickled on the other.

What was not made by a rank that knows the job's secret is not unpickled, see `unidist.negotiation.pickles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator
from unidist.negotiation import NamedOperations, OperationKind, Request
from unidist.negotiation.pickles import seal, unseal

_ORDERED = "gather_objects"


def allgather_object(operations: NamedOperations, obj: Any, *, name: str) -> list[Any]:
    """Return the objects of all ranks, in rank order. Every rank calls it with the same name.

    Args:
        operations: over the ranks in question.
        obj: anything that cloudpickle can pickle.
        name: what ranks match by.

    Raises:
        ForgedDataError: what came is not of a rank of this job.
    """
    payload = seal(obj, name)
    received = bytearray()

    def allocate(rows: tuple[int, ...]) -> Buffer:
        nonlocal received
        received = bytearray(sum(rows))
        return Buffer.of(received)

    handle = operations.submit(
        Request(
            f"{name}.objects",
            OperationKind.ALLGATHER,
            source=Buffer.of(payload),
            shape=(len(payload),),
            allocate_output=allocate,
        )
    )
    handle.wait()
    return _unseal_each(received, handle.rows, name)


def broadcast_object(operations: NamedOperations, obj: Any, *, root: int, name: str) -> Any:
    """Return rank `root`'s object on every rank; the root gets its own back. Every rank calls it with the same name.

    Args:
        operations: over the ranks in question.
        obj: on the root, anything that cloudpickle can pickle; elsewhere ignored.
        root: the rank in the group whose object it is.
        name: what ranks match by.

    Raises:
        ForgedDataError: what came is not of a rank of this job.
    """
    is_root = operations.rank == root
    payload = seal(obj, name) if is_root else bytearray()
    size = Buffer.allocate(1, DType.INT64)
    number = size.bytes().cast("q")
    number[0] = len(payload)
    _broadcast(operations, size, root, f"{name}.size")
    if not is_root:
        payload = bytearray(number[0])
    _broadcast(operations, Buffer.of(payload), root, f"{name}.object")
    return obj if is_root else unseal(payload, name)


def _broadcast(operations: NamedOperations, buffer: Buffer, root: int, name: str) -> None:
    request = Request(name, OperationKind.BROADCAST, target=buffer, shape=(buffer.count,), root=root)
    operations.submit(request).wait()


def gather_objects(communicator: Communicator, obj: Any) -> list[Any]:
    """Return the objects of all ranks of a communicator, in rank order: the ordered, unnamed form. Collective.

    Raises:
        ForgedDataError: what came is not of a rank of this job.
    """
    payload = seal(obj, _ORDERED)
    own, sizes = Buffer.allocate(1, DType.INT64), Buffer.allocate(communicator.size, DType.INT64)
    own.bytes().cast("q")[0] = len(payload)
    communicator.allgather(own, sizes).wait()
    counts = sizes.bytes().cast("q").tolist()
    received = bytearray(sum(counts))
    communicator.allgather(Buffer.of(payload), Buffer.of(received), counts=counts).wait()
    return _unseal_each(received, counts, _ORDERED)


def _unseal_each(received: bytearray, sizes: Sequence[int], purpose: str) -> list[Any]:
    objects, start = [], 0
    for size in sizes:
        objects.append(unseal(memoryview(received)[start : start + size], purpose))
        start += size
    return objects
