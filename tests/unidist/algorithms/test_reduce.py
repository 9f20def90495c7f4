"""Both kinds of arithmetic, compiled and numpy's, against each other and against known values."""

from __future__ import annotations

import numpy as np
import pytest

from unidist.algorithms import _reduce
from unidist.algorithms._reduce import Kernel, reduce_into, scale_in_place
from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp

COMPILED = _reduce._compiled_kernel()
REDUCTIONS = [(d, op) for d in DType for op in ReduceOp if not (d.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX))]
KERNELS = [_reduce._numpy_kernel()] + ([COMPILED] if COMPILED else [])


@pytest.fixture(params=KERNELS, ids=["numpy", "compiled"][: len(KERNELS)])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Let `reduce_into` use one kind of arithmetic."""
    chosen: Kernel = request.param
    monkeypatch.setattr(_reduce, "kernel", lambda: chosen)
    return chosen


def buffer_of(values: np.ndarray, dtype: DType) -> Buffer:
    return Buffer.of(values).cast(dtype) if values.size else Buffer(0, 0, dtype)


def bfloat16(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint16)


def test_a_mean_of_integers_loses_nothing_to_rounding(kernel: Kernel) -> None:
    for divisor in range(1, 200):
        values = np.array([divisor, -divisor, 3 * divisor - 1], np.int64)
        scale_in_place(buffer_of(values, DType.INT64), 1.0 / divisor)
        assert values.tolist() == [1, -1, (3 * divisor - 1) // divisor]


def test_other_scales_of_integers_truncate_toward_zero(kernel: Kernel) -> None:
    values = np.array([7, -7, 10], np.int32)
    reduce_into(
        buffer_of(values, DType.INT32), buffer_of(np.array([0, 0, 1], np.int32), DType.INT32), ReduceOp.SUM, 0.7
    )
    assert values.tolist() == [4, -4, 7]
    scale_in_place(buffer_of(values, DType.INT32), 0.0)
    assert values.tolist() == [0, 0, 0]
    scale_in_place(buffer_of(values, DType.INT32), 3.0)
    assert values.tolist() == [0, 0, 0]


def test_bool_is_true_or_false_whatever_the_scale_but_zero(kernel: Kernel) -> None:
    values = np.array([True, False, True])
    scale_in_place(buffer_of(values, DType.BOOL), 0.25)
    assert values.tolist() == [True, False, True]
    scale_in_place(buffer_of(values, DType.BOOL), 0.0)
    assert values.tolist() == [False, False, False]


def test_bfloat16_rounds_to_nearest_even(kernel: Kernel) -> None:
    one, two_pow_minus_8, three_pow_minus_8 = 0x3F80, 0x3B80, 0x3C40
    values = bfloat16(one, 0x3F81, one, 0x7F80, 0x7FC1)
    added = bfloat16(two_pow_minus_8, two_pow_minus_8, three_pow_minus_8, 0xFF80, one)
    reduce_into(buffer_of(values, DType.BFLOAT16), buffer_of(added, DType.BFLOAT16), ReduceOp.SUM)
    # Ties go to the even neighbour, down for 1 and up for 1 + 2**-7; three quarters go up; inf - inf and NaN stay NaN.
    assert values[:3].tolist() == [0x3F80, 0x3F82, 0x3F82]
    assert all(bits & 0x7F80 == 0x7F80 and bits & 0x7F for bits in values[3:].tolist())


def test_a_scale_is_applied_before_the_result_is_rounded(kernel: Kernel) -> None:
    values = np.array([65504.0], np.float16)
    reduce_into(buffer_of(values, DType.FLOAT16), buffer_of(values.copy(), DType.FLOAT16), ReduceOp.SUM, 0.5)
    assert values[0] == 65504.0  # the sum alone does not fit


@pytest.mark.skipif(COMPILED is None, reason="the C kernels are not built")
@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3, 2.5])
@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_compiled_and_numpy_agree(dtype: DType, op: ReduceOp, scale: float) -> None:
    generator = np.random.default_rng(1)
    count = 5000
    if dtype is DType.BOOL:
        given = generator.random((2, count)) < 0.5
    elif dtype is DType.BFLOAT16:
        given = (generator.uniform(-4, 4, (2, count)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    elif dtype.is_floating or dtype.is_complex:
        given = generator.uniform(-4, 4, (2, count)).astype(dtype.value)
    else:
        given = generator.integers(0, 6, (2, count)).astype(dtype.value)
    results = []
    for arithmetic in KERNELS:
        target = given[0].copy()
        arithmetic(buffer_of(target, dtype), buffer_of(given[1].copy(), dtype), op, scale)
        results.append(target)
    if dtype.is_complex and op is ReduceOp.PRODUCT:  # numpy may fuse multiplication and addition
        np.testing.assert_allclose(results[0], results[1], rtol=1e-5)
    else:
        np.testing.assert_array_equal(results[0], results[1])
