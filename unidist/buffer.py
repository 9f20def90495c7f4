"""Typed flat memory: what communicators move, whatever framework it came from."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from unidist.errors import UsageError

__all__ = [
    "Buffer",
    "DType",
    "HOST",
    "ITEM_BYTES",
    "copy",
    "device_kind",
]


class DType(StrEnum):
    """Element types, under the same names for every engine (numpy's names, plus bfloat16)."""

    BOOL = "bool"
    UINT8 = "uint8"
    INT8 = "int8"
    UINT16 = "uint16"
    INT16 = "int16"
    UINT32 = "uint32"
    INT32 = "int32"
    UINT64 = "uint64"
    INT64 = "int64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES[self]

    @property
    def is_floating(self) -> bool:
        """True for real floating-point types."""
        return self in _FLOATING

    @property
    def is_unsigned(self) -> bool:
        """True for booleans and unsigned integers, of which zero is the smallest."""
        return self in _UNSIGNED

    @property
    def is_complex(self) -> bool:
        """True for complex types, which have no order: MIN and MAX do not apply."""
        return self in (DType.COMPLEX64, DType.COMPLEX128)


ITEM_BYTES: dict[DType, int] = {
    DType.BOOL: 1,
    DType.UINT8: 1,
    DType.INT8: 1,
    DType.UINT16: 2,
    DType.INT16: 2,
    DType.UINT32: 4,
    DType.INT32: 4,
    DType.UINT64: 8,
    DType.INT64: 8,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.COMPLEX64: 8,
    DType.COMPLEX128: 16,
}
_FLOATING = frozenset((DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64))
_UNSIGNED = frozenset((DType.BOOL, DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64))

HOST = "host"
"""The memory kind of ordinary process memory. Others are framework device names such as "cuda:0"."""


def device_kind(memories: Iterable[str]) -> str | None:
    """Return the kind of device ("cuda") that has some of these memories; None: all are ordinary memory.

    Raises:
        UsageError: there are devices of several kinds; names them.
    """
    kinds = sorted({memory.partition(":")[0] for memory in memories} - {HOST})
    if len(kinds) > 1:
        raise UsageError(f"memory of {' and '.join(kinds)}: one model's parameters are on devices of one kind")
    return kinds[0] if kinds else None


@dataclass(frozen=True, slots=True, init=False)
class Buffer:
    """A contiguous run of elements in memory that somebody else owns.

    Args:
        address: of the first byte. May be 0 when `count` is 0.
        count: number of elements.
        dtype: element type.
        owner: kept alive as long as this buffer lives; an engine with a native tensor type may
            recognise it here and use it instead of the address. It must then cover exactly this buffer.
        memory: the memory kind, "host" or a device name.
    """

    address: int
    count: int
    dtype: DType
    owner: Any = None
    memory: str = HOST

    def __init__(self, address: int, count: int, dtype: DType, owner: Any = None, memory: str = HOST) -> None:
        _set_address(self, address)  # what a frozen dataclass does itself takes twice as long
        _set_count(self, count)
        _set_dtype(self, dtype)
        _set_owner(self, owner)
        _set_memory(self, memory)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * ITEM_BYTES[self.dtype]

    def slice(self, start: int, count: int) -> Buffer:
        """Return elements `start` to `start + count` as a buffer over the same memory."""
        if start < 0 or count < 0 or start + count > self.count:
            raise UsageError(f"slice [{start}, {start + count}) is outside of a buffer of {self.count} elements")
        return Buffer(self.address + start * ITEM_BYTES[self.dtype], count, self.dtype, self, self.memory)

    def cast(self, dtype: DType) -> Buffer:
        """Return the same bytes seen as `dtype`; the size must divide."""
        if self.nbytes % dtype.itemsize:
            raise UsageError(f"{self.nbytes} bytes are not a whole number of {dtype} elements")
        return Buffer(self.address, self.nbytes // dtype.itemsize, dtype, self, self.memory)

    def bytes(self) -> memoryview:
        """Return the memory as a writable memoryview of bytes. Host memory only."""
        if self.memory != HOST:
            raise UsageError(f"memory of kind {self.memory!r} cannot be read by address from the host")
        if not self.count:
            return memoryview(bytearray())
        return memoryview((ctypes.c_char * self.nbytes).from_address(self.address)).cast("B")

    @classmethod
    def of(cls, data: Any) -> Buffer:
        """Return a buffer over a bytearray, a writable contiguous memoryview, or a numpy array, without a copy.

        Raises:
            UsageError: the object is read-only, not contiguous, or of a type without a DType.
        """
        interface = getattr(data, "__array_interface__", None)
        if interface is not None:
            address, read_only = interface["data"]
            dtype = DType(data.dtype.name)
            if interface.get("strides") is not None or read_only:
                raise UsageError(
                    "a buffer needs a writable C-contiguous array; use numpy.ascontiguousarray(...).copy()"
                )
            return cls(address if data.size else 0, data.size, dtype, data)
        view = memoryview(data)
        if view.readonly or not view.c_contiguous:
            raise UsageError("a buffer needs writable contiguous memory; copy the data into a bytearray")
        dtype = _dtype_of_format(view.format)
        if not view.nbytes:
            return cls(0, 0, dtype, data)
        address = ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B")))
        return cls(address, view.nbytes // dtype.itemsize, dtype, data)

    @classmethod
    def allocate(cls, count: int, dtype: DType) -> Buffer:
        """Return a new zeroed buffer in ordinary host memory."""
        return cls.of(bytearray(count * dtype.itemsize)).cast(dtype)


_set_address, _set_count, _set_dtype, _set_owner, _set_memory = (
    Buffer.__dict__[each.name].__set__ for each in fields(Buffer)
)


def copy(source: Buffer, target: Buffer) -> None:
    """Copy `source` into `target`, both in host memory and of equal size in bytes."""
    if source.nbytes != target.nbytes:
        raise UsageError(f"cannot copy {source.nbytes} bytes into {target.nbytes} bytes")
    if source.address != target.address and source.nbytes:
        ctypes.memmove(target.address, source.address, source.nbytes)


_FORMATS = {"B": DType.UINT8, "b": DType.INT8, "c": DType.UINT8, "?": DType.BOOL, "H": DType.UINT16, "h": DType.INT16}
_FORMATS |= {"I": DType.UINT32, "i": DType.INT32, "L": DType.UINT64, "l": DType.INT64, "Q": DType.UINT64}
_FORMATS |= {"q": DType.INT64, "e": DType.FLOAT16, "f": DType.FLOAT32, "d": DType.FLOAT64}


def _dtype_of_format(code: str) -> DType:
    if code not in _FORMATS:
        raise UsageError(f"memory of format {code!r} has no DType; choices: {', '.join(DType)}")
    return _FORMATS[code]
