"""What a rank puts into a checkpoint: tensors by name, and the pieces of them that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from unidist.buffer import HOST, Buffer, DType
from unidist.checkpoint.parts import Box, Part
from unidist.errors import UsageError

SLOT = "#"
"""Between the path of a parameter and the name of a slot of optimizer state."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A whole tensor, however it is spread over ranks. Equal on every rank that holds some of it.

    Args:
        name: within its section of the checkpoint; of optimizer state `slot_name(path, slot)`.
        shape: of the whole tensor.
        dtype: its element type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a tensor in this rank's memory.

    Args:
        tensor: of which it is a part.
        part: which elements.
        memory: host memory that holds them, side by side and in the part's order.
        is_copy: nobody else writes to the memory (it was copied from a device, say), so a snapshot need not copy it.
    """

    tensor: TensorInfo
    part: Part
    memory: Buffer
    is_copy: bool = False

    def __post_init__(self) -> None:
        tensor, memory = self.tensor, self.memory
        if not self.part.fits(tensor.shape):
            raise UsageError(f"the box {self.part.box} does not lie within the tensor {tensor}")
        if (memory.count, memory.dtype, memory.memory) != (self.part.count, tensor.dtype, HOST):
            raise UsageError(
                f"a piece of {self.part.count} elements of {tensor} cannot be in a buffer of {memory.count} elements "
                f"of {memory.dtype} in memory of kind {memory.memory!r}; give host memory of the tensor's own type"
            )

    @classmethod
    def whole(cls, name: str, shape: Sequence[int], memory: Buffer, *, is_copy: bool = False) -> Piece:
        """Return a whole tensor of the memory's type, as one piece."""
        return cls(TensorInfo(name, tuple(shape), memory.dtype), Part.whole(shape), memory, is_copy)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a parameter of this rank lies in the whole model's.

    Args:
        name: stable path in the whole model, the same whatever the world size and the strategies.
        shape: of the whole parameter.
        box: what this rank holds of it.
    """

    name: str
    shape: tuple[int, ...]
    box: Box

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Placement:
        """Return the placement of a parameter that this rank holds as a whole."""
        return cls(name, tuple(shape), tuple((0, size) for size in shape))

    def tensor(self, dtype: DType, slot: str | None = None) -> TensorInfo:
        """Return the whole parameter, or a slot of optimizer state of its shape."""
        return TensorInfo(self.name if slot is None else slot_name(self.name, slot), self.shape, dtype)

    def part(self, start: int = 0, stop: int | None = None) -> Part:
        """Return elements [start, stop) of what this rank holds, in row-major order; default: all."""
        whole = Part.of_box(self.box)
        return whole.range_within(start, whole.count if stop is None else stop)


def slot_name(path: str, slot: str) -> str:
    """Return the name of a slot of the optimizer state of the parameter at `path`."""
    return f"{path}{SLOT}{slot}"


def split_slot(name: str) -> tuple[str, str]:
    """Return path and slot of a name that `slot_name` made."""
    path, separator, slot = name.rpartition(SLOT)
    if not separator:
        raise UsageError(f"{name!r} is no name of optimizer state; they look like PATH{SLOT}SLOT")
    return path, slot
