"""The content of a rank's part of a checkpoint: tensors by name, and the pieces of them that the rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from unidist.buffer import HOST, Buffer, DType
from unidist.checkpoint.format.parts import Box, Part, joint_dim
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
        source: host memory that holds them, side by side and in the part's order; or a function that copies them there
            (from a device, say), called when this rank is to write the piece, and only then.
    """

    tensor: TensorInfo
    part: Part
    source: Buffer | Callable[[], Buffer]

    def __post_init__(self) -> None:
        if not self.part.fits(self.tensor.shape):
            raise UsageError(f"the box {self.part.box} does not lie within the tensor {self.tensor}")
        if isinstance(self.source, Buffer):
            self._check(self.source)

    @property
    def is_copied(self) -> bool:
        """Return whether `memory` makes a copy, to which nobody else writes."""
        return not isinstance(self.source, Buffer)

    @property
    def memory(self) -> Buffer:
        """The elements in host memory."""
        if isinstance(self.source, Buffer):
            return self.source
        made = self.source()
        self._check(made)
        return made

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.part.count * self.tensor.dtype.itemsize

    @classmethod
    def whole(cls, name: str, shape: Sequence[int], memory: Buffer) -> Piece:
        """Return a whole tensor of the memory's type, as one piece."""
        return cls(TensorInfo(name, tuple(shape), memory.dtype), Part.whole(shape), memory)

    def _check(self, memory: Buffer) -> None:
        if (memory.count, memory.dtype, memory.memory) != (self.part.count, self.tensor.dtype, HOST):
            raise UsageError(
                f"a piece of {self.part.count} elements of {self.tensor} cannot be in a buffer of {memory.count} "
                f"elements of {memory.dtype} in memory of kind {memory.memory!r}; give host memory of the tensor's type"
            )


@dataclass(frozen=True, slots=True)
class Placement:
    """The position of this rank's part of a parameter in the whole model.

    Args:
        name: stable path in the whole model, the same whatever the world size and the strategies.
        shape: of the whole parameter.
        box: the part that this rank holds.
        more: further boxes of it that this rank holds, side by side with the first, see `Part`.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    more: tuple[Box, ...] = ()

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Placement:
        """Return the placement of a parameter that this rank holds as a whole."""
        return cls(name, tuple(shape), tuple((0, size) for size in shape))

    def named_under(self, prefix: str) -> Placement:
        """Return the same with the name that it has among those of several models; "" if there is one model."""
        return replace(self, name=f"{prefix}.{self.name}") if prefix else self

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what this rank holds."""
        sizes = [stop - start for start, stop in self.box]
        for box in self.more:
            dim = joint_dim((self.box, box))
            assert dim is not None
            sizes[dim] += box[dim][1] - box[dim][0]
        return tuple(sizes)

    @property
    def indices(self) -> tuple[list[int], ...]:
        """For each dim, the indices of the whole parameter that this rank holds, in rising order."""
        boxes = (self.box, *self.more)
        return tuple(sorted({i for box in boxes for i in range(*box[dim])}) for dim in range(len(self.shape)))

    def tensor(self, dtype: DType, slot: str | None = None) -> TensorInfo:
        """Return the whole parameter, or a slot of optimizer state of its shape."""
        return TensorInfo(self.name if slot is None else slot_name(self.name, slot), self.shape, dtype)

    def part(self, start: int = 0, stop: int | None = None) -> Part:
        """Return elements [start, stop) of what this rank holds, in row-major order; default: all."""
        whole = Part.of_boxes((self.box, *self.more))
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
