from __future__ import annotations

import numpy as np
import pytest

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp
from unidist_bench import pattern

_NUMPY = [dtype for dtype in DType if dtype is not DType.BFLOAT16]


def filled(count: int, dtype: DType, values: list[int], first: int = 0) -> Buffer:
    buffer = Buffer.allocate(count, dtype)
    pattern.fill(buffer, values, first=first)
    return buffer


def as_numpy(buffer: Buffer) -> np.ndarray:
    """Return a copy: an array over the bytes would not keep the buffer."""
    if buffer.dtype is DType.BFLOAT16:
        upper = np.frombuffer(buffer.bytes(), np.uint16).astype(np.uint32) << 16
        return upper.view(np.float32)
    return np.frombuffer(buffer.bytes(), buffer.dtype).copy()


@pytest.mark.parametrize("dtype", list(DType))
def test_the_pattern_is_written_as_numbers_of_the_dtype_through_several_blocks(dtype: DType) -> None:
    values, count = pattern.values_of(1, 3, dtype), 50_001
    found = as_numpy(filled(count, dtype, values, first=5))
    wanted = np.resize(np.array(values), count + 5)[5:]
    np.testing.assert_array_equal(found, wanted.astype(found.dtype))


@pytest.mark.parametrize("dtype", _NUMPY)
@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("num_ranks", [2, 3, 8, 60])
def test_what_is_expected_of_a_reduction_is_what_numpy_computes(dtype: DType, op: ReduceOp, num_ranks: int) -> None:
    if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
        return  # complex numbers have no order
    count = 500
    sources = [as_numpy(filled(count, dtype, pattern.values_of(r, num_ranks, dtype, op))) for r in range(num_ranks)]
    if dtype is DType.BOOL:
        reduce = np.logical_or if op in (ReduceOp.SUM, ReduceOp.MAX) else np.logical_and
    else:
        reduce = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    wanted = reduce.reduce(np.stack(sources), axis=0)
    found = as_numpy(filled(count, dtype, pattern.reduced(num_ranks, op, dtype)))
    np.testing.assert_array_equal(found, wanted.astype(found.dtype))


def test_sums_stay_small_enough_for_int8_and_bfloat16_at_any_number_of_ranks() -> None:
    for num_ranks in (2, 7, 50, 51, 128, 1000):
        assert max(pattern.reduced(num_ranks, ReduceOp.SUM, DType.FLOAT32)) <= 127
        assert len(set(pattern.reduced(num_ranks, ReduceOp.SUM, DType.FLOAT32))) > 1 or num_ranks > 50


@pytest.mark.parametrize("dtype", list(DType))
def test_each_wrong_element_is_counted_once(dtype: DType) -> None:
    values, count = pattern.values_of(0, 2, dtype), 40_000
    buffer = filled(count, dtype, values)
    assert pattern.count_wrong(buffer, values) == 0
    for place in (0, 17, 39_999):
        buffer.bytes()[place * dtype.itemsize] ^= 0xFF
    assert pattern.count_wrong(buffer, values) == 3
    pattern.spoil(buffer)
    assert pattern.count_wrong(buffer, values) == count


def test_an_empty_buffer_has_nothing_wrong() -> None:
    assert pattern.count_wrong(Buffer(0, 0, DType.FLOAT32), [1, 2]) == 0
