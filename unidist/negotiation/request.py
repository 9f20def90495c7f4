"""A rank's request for a named operation, with its buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import NamedTuple

from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import ReduceOp
from unidist.errors import OperationError
from unidist.negotiation.devices import DeviceOrder


class OperationKind(StrEnum):
    """The operations that can be named."""

    ALLREDUCE = "allreduce"
    ADASUM = "adasum"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    REDUCESCATTER = "reducescatter"
    ALLTOALL = "alltoall"
    BARRIER = "barrier"
    JOIN = "join"
    """This rank has run out of data; submitted by `NamedOperations.join` alone."""


AllocateOutput = Callable[[tuple[int, ...]], Buffer]
"""Makes the output of an all-gather or all-to-all when its size is known.

Called with the rows (size of dim 0) that come from each rank, by rank, on the thread that runs the operation,
which may be a background one; returns a buffer of `sum(rows)` rows. Where it raises, the peers are already
waiting, so the error ends the negotiator on every rank.
"""


class Signature(NamedTuple):
    """The properties of a request that must match on all ranks, as in `Request`.

    `memory` is the buffers' kind without the number of a device: "host", "cuda".
    """

    kind: OperationKind
    dtype: DType
    shape: tuple[int, ...]
    op: ReduceOp
    root: int
    scale: float
    memory: str
    splits: tuple[int, ...]
    prescale: float = 1.0


_NOTHING = Buffer(0, 0, DType.UINT8)
_WITHOUT_DATA = frozenset((OperationKind.BARRIER, OperationKind.JOIN))
_ELEMENTWISE = frozenset((OperationKind.ALLREDUCE, OperationKind.ADASUM))


@dataclass(slots=True, eq=False)
class Request:
    """One rank's side of a named operation. Every rank submits one of the same name. Nothing changes it.

    Kind, dtype, op, root, both scales and memory kind are the same on every rank, and so is the shape, except for the
    rows (dim 0) of an all-gather or all-to-all. The buffers belong to the negotiator until the handle is done.

    Args:
        name: what ranks match by; at most one operation of a name is under way on a rank.
        kind: the operation.
        source: `prod(shape)` elements; not given for broadcast, barrier and join.
        target: allreduce and adasum: like `source`, may be `source`. Broadcast: data on the root, filled elsewhere.
            Reducescatter: the rows that `reducescatter_rows` gives this rank. Others: not given.
        shape: of this rank's tensor (`source`; for a broadcast `target`).
        op: reduction of an allreduce or reducescatter.
        root: rank whose data a broadcast copies.
        scale: factor of a reduction's result (1/size gives the mean).
        splits: all-to-all: rows for each rank, adding up to `shape[0]`.
        prescale: factor by which the submitter has multiplied `source` already; ranks only compare it.
        order: of the operation among what the submitter queues on a device; None: buffers in host memory.
        allocate_output: all-gather and all-to-all: makes the output.

    Raises:
        OperationError: what is given does not go together.
    """

    name: str
    kind: OperationKind
    source: Buffer = _NOTHING
    target: Buffer = _NOTHING
    shape: tuple[int, ...] = ()
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    scale: float = 1.0
    splits: tuple[int, ...] = ()
    allocate_output: AllocateOutput | None = None
    prescale: float = 1.0
    order: DeviceOrder | None = None
    signature: Signature = field(init=False, repr=False)
    """What the ranks compare; made once, so that a repeated request costs one comparison of tuples."""

    @property
    def row(self) -> str:
        """The name of its row in a timeline with a row for each tensor, as Horovod writes it: "allreduce.loss"."""
        kind = f"{self.kind}."
        return self.name if self.name.startswith(kind) else kind + self.name

    def __post_init__(self) -> None:
        data = self.target if self.kind is OperationKind.BROADCAST else self.source
        memory = HOST if data.memory == HOST else data.memory.partition(":")[0]
        fields = self.kind, data.dtype, self.shape, self.op, self.root, self.scale, memory, self.splits, self.prescale
        self.signature = tuple.__new__(Signature, fields)  # what the class does itself takes twice as long

    def check(self, rank: int, size: int) -> None:
        """Raise OperationError unless this request can run on rank `rank` of a group of `size`.

        Looks at this rank's side only. Called for signatures that were not seen before.
        """
        kind = self.kind
        if kind in _WITHOUT_DATA:
            return
        data = self.target if kind is OperationKind.BROADCAST else self.source
        if data.count != prod(self.shape):
            raise self.error(f"a buffer of {data.count} elements is not of shape {self.shape}")
        if kind is OperationKind.BROADCAST:
            if not 0 <= self.root < size:
                raise self.error(f"root {self.root} is not a rank of this group; choices: 0 to {size - 1}")
            return
        if kind not in _ELEMENTWISE and not self.shape:
            raise self.error("a scalar has no rows to divide; give it the shape (1,)")
        if kind is OperationKind.ADASUM:
            self._check_adasum(size)
        if kind in _ELEMENTWISE or kind is OperationKind.REDUCESCATTER:
            self._check_reduction(rank, size)
        else:
            self._check_exchange(size)

    def _check_adasum(self, size: int) -> None:
        if not self.source.dtype.is_floating:
            raise self.error(f"Adasum needs floating-point numbers, not {self.source.dtype}")
        if size & (size - 1):
            raise self.error(f"Adasum combines ranks in pairs: {size} ranks are not a power of 2")

    def _check_reduction(self, rank: int, size: int) -> None:
        source, target = self.source, self.target
        if source.dtype.is_complex and self.op in (ReduceOp.MIN, ReduceOp.MAX):
            raise self.error(f"{self.op} of {source.dtype}: complex numbers have no order; use sum or product")
        expected = source.count
        if self.kind is OperationKind.REDUCESCATTER:
            expected = reducescatter_rows(self.shape[0], size)[rank] * prod(self.shape[1:])
        if target.count != expected or target.dtype is not source.dtype or target.memory != source.memory:
            raise self.error(
                f"the target holds {target.count} {target.dtype} elements in {target.memory} memory, "
                f"but {expected} {source.dtype} in {source.memory} memory are needed"
            )

    def _check_exchange(self, size: int) -> None:
        if self.allocate_output is None:
            raise self.error("its output size is known after the agreement only; give allocate_output")
        if self.kind is OperationKind.ALLTOALL and (
            len(self.splits) != size or min(self.splits) < 0 or sum(self.splits) != self.shape[0]
        ):
            raise self.error(
                f"splits {list(self.splits)} must be {size} numbers of at least 0, one for each rank, "
                f"that add up to the {self.shape[0]} rows"
            )

    def error(self, problem: str) -> OperationError:
        """Return an error that names this request."""
        return OperationError(f"{self.kind} {self.name!r}: {problem}")


def match_key(signature: Signature) -> tuple[object, ...]:
    """Return what must be the same on every rank: of the fields of a request those that matter to its kind."""
    kind, dtype, shape, op, root, scale, memory, _, prescale = signature
    if kind in _WITHOUT_DATA:
        return (kind,)
    if kind is OperationKind.BROADCAST:
        return kind, dtype, memory, shape, root
    if kind in (OperationKind.ALLGATHER, OperationKind.ALLTOALL):
        return kind, dtype, memory, shape[1:]
    return kind, dtype, memory, shape, op, scale, prescale


def describe(signature: Signature) -> str:
    """Return a signature in words: "allreduce float32 (4, 3) sum"."""
    kind, dtype, shape, op, root, scale, memory, _, prescale = signature
    if kind in _WITHOUT_DATA:
        return str(kind)
    words = [str(kind), str(dtype), str(shape)]
    if kind in (OperationKind.ALLREDUCE, OperationKind.REDUCESCATTER):
        words += [str(op)] + ([f"scale {scale:g}"] if scale != 1.0 else [])
    if prescale != 1.0:
        words.append(f"prescale {prescale:g}")
    if kind is OperationKind.BROADCAST:
        words.append(f"from root {root}")
    if memory != HOST:
        words.append(f"in {memory} memory")
    return " ".join(words)


def reducescatter_rows(rows: int, size: int) -> list[int]:
    """Return how many rows of a reducescatter each rank keeps: as even as can be, lower ranks one more."""
    small, larger = divmod(rows, size)
    return [small + (rank < larger) for rank in range(size)]
