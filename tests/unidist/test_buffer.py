"""Buffers: typed views of memory that somebody else owns."""

from __future__ import annotations

import array
import gc
import weakref

import numpy as np
import pytest

from unidist.buffer import Buffer, DType, copy, device_kind
from unidist.errors import UsageError


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.BFLOAT16])
def test_a_numpy_array_is_seen_without_a_copy(dtype: DType) -> None:
    data = np.zeros(5, dtype.value)
    buffer = Buffer.of(data)
    assert (buffer.dtype, buffer.count, buffer.nbytes) == (dtype, 5, 5 * dtype.itemsize)
    data.view(np.uint8)[0] = 7
    assert buffer.bytes()[0] == 7
    buffer.bytes()[1] = 9
    assert data.view(np.uint8)[1] == 9


def test_bytearrays_and_typed_memory_are_seen_with_their_type() -> None:
    assert Buffer.of(bytearray(3)).dtype is DType.UINT8
    assert Buffer.of(array.array("d", [1.0, 2.0])).dtype is DType.FLOAT64
    assert Buffer.of(memoryview(array.array("q", [1]))).dtype is DType.INT64


def test_what_cannot_be_written_in_one_run_is_refused() -> None:
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    for data in (np.zeros((4, 4))[:, 1], read_only, b"abc", memoryview(bytearray(10))[::2]):
        with pytest.raises(UsageError, match="writable"):
            Buffer.of(data)


def test_memory_without_a_dtype_is_refused_with_the_choices() -> None:
    with pytest.raises(UsageError, match="bfloat16"):
        Buffer.of((__import__("ctypes").c_longdouble * 2)())


def test_empty_memory_has_no_address() -> None:
    for empty in (Buffer.of(bytearray()), Buffer.of(np.zeros(0)), Buffer.allocate(0, DType.INT16)):
        assert (empty.count, empty.nbytes) == (0, 0)
        assert len(empty.bytes()) == 0


def test_a_slice_is_part_of_the_same_memory_and_stays_inside() -> None:
    data = np.arange(10, dtype=np.int32)
    part = Buffer.of(data).slice(3, 4)
    assert np.frombuffer(part.bytes(), np.int32).tolist() == [3, 4, 5, 6]
    assert part.slice(1, 2).address == data.ctypes.data + 16
    for start, count in ((-1, 2), (0, 11), (8, 3), (2, -1)):
        with pytest.raises(UsageError, match="outside"):
            Buffer.of(data).slice(start, count)


def test_a_cast_keeps_the_bytes_and_must_divide() -> None:
    buffer = Buffer.of(np.arange(6, dtype=np.int16))
    assert buffer.cast(DType.INT32).count == 3
    assert buffer.cast(DType.BFLOAT16).count == 6
    with pytest.raises(UsageError, match="12 bytes are not a whole number of float64"):
        buffer.cast(DType.FLOAT64)


def test_views_keep_the_owner_alive() -> None:
    class Owner(bytearray):
        pass

    owner = Owner(8)
    gone = weakref.ref(owner)
    view = Buffer.of(owner).cast(DType.INT32).slice(1, 1)
    del owner
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_device_memory_is_not_read_by_address() -> None:
    with pytest.raises(UsageError, match="cuda:0"):
        Buffer(4096, 1, DType.FLOAT32, None, "cuda:0").bytes()


def test_allocated_memory_is_zeroed() -> None:
    buffer = Buffer.allocate(3, DType.COMPLEX128)
    assert bytes(buffer.bytes()) == bytes(48)


def test_copy_needs_equal_sizes() -> None:
    source, target = Buffer.of(bytearray(b"abcd")), Buffer.allocate(2, DType.INT16)
    copy(source, target)
    assert bytes(target.bytes()) == b"abcd"
    copy(target, target)
    with pytest.raises(UsageError, match="cannot copy 4 bytes into 3"):
        copy(source, Buffer.allocate(3, DType.UINT8))


def test_parameters_are_on_devices_of_one_kind() -> None:
    assert device_kind(["host", "host"]) is None
    assert device_kind(["host", "cuda:0", "cuda:1"]) == "cuda"
    with pytest.raises(UsageError, match="memory of cuda and tpu"):
        device_kind(["cuda:0", "tpu:0", "host"])
