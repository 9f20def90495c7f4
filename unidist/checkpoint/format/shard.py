"""Shards: safetensors files. Written by the safetensors package without a copy, read in ranges without a framework."""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import safetensors

from unidist.buffer import Buffer, DType
from unidist.errors import CheckpointError

_CODES = {
    DType.BOOL: "BOOL", DType.UINT8: "U8", DType.INT8: "I8", DType.UINT16: "U16", DType.INT16: "I16",
    DType.UINT32: "U32", DType.INT32: "I32", DType.UINT64: "U64", DType.INT64: "I64", DType.FLOAT16: "F16",
    DType.BFLOAT16: "BF16", DType.FLOAT32: "F32", DType.FLOAT64: "F64", DType.COMPLEX64: "C64",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in _CODES.items()}
"""Element types by their code in the format. It has no complex128, which is stored as pairs of float64."""

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@dataclass(frozen=True)
class Entry:
    """One tensor of a shard.

    Args:
        dtype: element type, as the file says it.
        shape: as the file says it.
        offset: of its first byte in the file.
        nbytes: its size.
    """

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def write_shard(path: Path, tensors: Mapping[str, tuple[tuple[int, ...], Buffer]], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, and have it on the disk when this returns.

    Args:
        path: the file; it appears under this name when it is complete.
        tensors: shape and memory by name.
        metadata: texts that the file carries.

    Raises:
        OSError: the disk refuses.
    """
    specs = {}
    for name, (shape, memory) in tensors.items():
        dtype, dims = memory.dtype, shape
        if dtype is DType.COMPLEX128:
            dtype, dims = DType.FLOAT64, (*shape, 2)
        specs[name] = safetensors.TensorSpec(
            dtype=str(dtype), shape=dims, data_ptr=memory.address, data_len=memory.nbytes
        )
    path.touch()  # says what mode a new file has here: the package makes files that only their owner can read
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        safetensors.serialize_file(specs, path, dict(metadata))
    except safetensors.SafetensorError as exc:
        raise _as_os_error(exc, path) from exc
    if stat.S_IMODE(path.stat().st_mode) != mode:  # some versions of the package put another file in its place
        path.chmod(mode)
    sync(path)


def checksums(memory: Buffer, chunk_bytes: int) -> list[int]:
    """Return the CRC-32 of every chunk of some memory; the last one may be shorter."""
    view = memory.bytes()
    return [zlib.crc32(view[start : start + chunk_bytes]) for start in range(0, memory.nbytes, chunk_bytes)]


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Shard:
    """A safetensors file that is read in ranges; use it in a `with` statement.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is not there, may not be read, is truncated, or is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise CheckpointError(f"the shard {path} cannot be opened: {exc.strerror}. {advice(exc)}") from exc
        try:
            self.entries, self.metadata = self._header()
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, target: memoryview) -> None:
        """Fill `target` with what the file has from `offset` on.

        Raises:
            CheckpointError: the file ends before, or the disk fails.
        """
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done:]], offset + done)
            except OSError as exc:
                raise CheckpointError(f"the shard {self.path} cannot be read: {exc.strerror}") from exc
            if not count:
                raise self._damaged(f"it ends at byte {offset + done}, within a tensor")
            done += count

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        size = os.fstat(self._descriptor).st_size
        if size < 8:
            raise self._damaged(f"it has {size} bytes")
        length = bytearray(8)
        self.read(0, memoryview(length))
        header_bytes = int.from_bytes(length, "little")
        if not 0 < header_bytes <= min(size - 8, _MAX_HEADER_BYTES):
            raise self._damaged(f"its header should have {header_bytes} bytes, and the file has {size}")
        header = bytearray(header_bytes)
        self.read(8, memoryview(header))
        try:
            fields: dict[str, Any] = json.loads(header)
            metadata = fields.pop("__metadata__", {})
            entries = {name: _entry(field, 8 + header_bytes) for name, field in fields.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise self._damaged(f"its header cannot be read ({exc!r})") from exc
        expected = max((entry.offset + entry.nbytes for entry in entries.values()), default=8 + header_bytes)
        if expected != size:
            raise self._damaged(f"it has {size} bytes instead of {expected}")
        return entries, metadata

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the shard {self.path} is damaged or truncated: {what}. Copy the checkpoint again, or load an earlier one."
        )


def _entry(field: dict[str, Any], base: int) -> Entry:
    start, stop = field["data_offsets"]
    dtype, shape = DTYPES[field["dtype"]], tuple(map(int, field["shape"]))
    if not 0 <= start <= stop or stop - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"{stop - start} bytes for {field['dtype']}{list(shape)}")
    return Entry(dtype, shape, base + start, stop - start)


def _as_os_error(error: Exception, path: Path) -> OSError:
    found = _OS_ERROR.search(str(error))
    if found is None:
        return OSError(f"{path} cannot be written: {error}")
    number = int(found[1])
    return OSError(number, os.strerror(number), str(path))


def advice(error: OSError) -> str:
    """Return what can be done where a file of a checkpoint cannot be opened."""
    if isinstance(error, PermissionError):
        return "Ask its owner for permission to read it."
    return "Copy the whole checkpoint, with all its shards."
