"""Exchanging Python objects by name: pickled on one side, unpickled on the other.

The bytes come from ranks of the same job, which have shown that they run as the same user and know the job's
secret; nothing from elsewhere is unpickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator
from unidist.negotiation import NamedOperations, OperationKind, Request


def allgather_object(operations: NamedOperations, obj: Any, *, name: str) -> list[Any]:
    """Return the objects of all ranks, in rank order. Every rank calls it with the same name.

    Args:
        operations: over the ranks in question.
        obj: anything that cloudpickle can pickle.
        name: what ranks match by.
    """
    payload = bytearray(cloudpickle.dumps(obj))
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
    return _unpickle(received, handle.rows)


def broadcast_object(operations: NamedOperations, obj: Any, *, root: int, name: str) -> Any:
    """Return rank `root`'s object on every rank; the root gets its own back. Every rank calls it with the same name.

    Args:
        operations: over the ranks in question.
        obj: on the root, anything that cloudpickle can pickle; elsewhere ignored.
        root: the rank in the group whose object it is.
        name: what ranks match by.
    """
    is_root = operations.rank == root
    payload = bytearray(cloudpickle.dumps(obj)) if is_root else bytearray()
    size = Buffer.allocate(1, DType.INT64)
    number = size.bytes().cast("q")
    number[0] = len(payload)
    _broadcast(operations, size, root, f"{name}.size")
    if not is_root:
        payload = bytearray(number[0])
    _broadcast(operations, Buffer.of(payload), root, f"{name}.object")
    return obj if is_root else pickle.loads(payload)


def _broadcast(operations: NamedOperations, buffer: Buffer, root: int, name: str) -> None:
    request = Request(name, OperationKind.BROADCAST, target=buffer, shape=(buffer.count,), root=root)
    operations.submit(request).wait()


def gather_objects(communicator: Communicator, obj: Any) -> list[Any]:
    """Return the objects of all ranks of a communicator, in rank order: the ordered, unnamed form. Collective."""
    payload = bytearray(cloudpickle.dumps(obj))
    own, sizes = Buffer.allocate(1, DType.INT64), Buffer.allocate(communicator.size, DType.INT64)
    own.bytes().cast("q")[0] = len(payload)
    communicator.allgather(own, sizes).wait()
    counts = sizes.bytes().cast("q").tolist()
    received = bytearray(sum(counts))
    communicator.allgather(Buffer.of(payload), Buffer.of(received), counts=counts).wait()
    return _unpickle(received, counts)


def _unpickle(received: bytearray, sizes: Sequence[int]) -> list[Any]:
    objects, start = [], 0
    for size in sizes:
        objects.append(pickle.loads(memoryview(received)[start : start + size]))
        start += size
    return objects
