"""Every algorithm against numpy: ranks, counts, dtypes, reductions, scale."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from unidist.algorithms import ALGORITHMS
from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp
from unidist.errors import ConfigurationError, UsageError
from unidist.testing.recording import RecordingCommunicator
from unidist.testing.threads import ThreadWorld

COUNTS = (0, 1, 2, 7, 64, 1000)
REDUCTIONS: dict[ReduceOp, Callable[..., np.ndarray]] = {
    ReduceOp.SUM: np.add.reduce,
    ReduceOp.PRODUCT: np.multiply.reduce,
    ReduceOp.MIN: np.minimum.reduce,
    ReduceOp.MAX: np.maximum.reduce,
}
TOLERANCE = {DType.FLOAT16: 4e-3, DType.BFLOAT16: 3e-2, DType.FLOAT32: 1e-6, DType.COMPLEX64: 1e-6}


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Truncate: inputs need only be representable."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def make_inputs(dtype: DType, op: ReduceOp, size: int, count: int) -> list[np.ndarray]:
    generator = np.random.default_rng([size, count])
    if dtype is DType.BOOL:
        return [generator.random(count) < 0.5 for _ in range(size)]
    if dtype.is_complex:
        parts = generator.uniform(0.5, 1.5, (2, size, count))
        return list((parts[0] + 1j * parts[1]).astype(dtype.value))
    if dtype.is_floating:
        values = generator.uniform(0.5, 1.5, (size, count))
        return [to_bfloat16(row) if dtype is DType.BFLOAT16 else row.astype(dtype.value) for row in values]
    high = 3 if op is ReduceOp.PRODUCT else 100  # sums and products may wrap around, in numpy too
    return list(generator.integers(0, high, (size, count)).astype(dtype.value))


def expected_result(inputs: list[np.ndarray], dtype: DType, op: ReduceOp, scale: float) -> np.ndarray:
    if dtype is DType.BOOL:
        combined = np.any(inputs, axis=0) if op in (ReduceOp.SUM, ReduceOp.MAX) else np.all(inputs, axis=0)
        return combined & bool(scale)
    if dtype is DType.BFLOAT16:
        return REDUCTIONS[op]([from_bfloat16(each).astype(np.float64) for each in inputs]) * scale
    if dtype.is_floating or dtype.is_complex:
        wide = np.complex128 if dtype.is_complex else np.float64
        return REDUCTIONS[op]([each.astype(wide) for each in inputs]) * scale
    exact = (
        REDUCTIONS[op](inputs, dtype=dtype.value) if op in (ReduceOp.SUM, ReduceOp.PRODUCT) else REDUCTIONS[op](inputs)
    )
    return np.trunc(exact * scale).astype(dtype.value) if scale != 1.0 else exact


def assert_result(result: np.ndarray, expected: np.ndarray, dtype: DType, size: int) -> None:
    if dtype is DType.BFLOAT16:
        result = from_bfloat16(result)
    if dtype.is_floating or dtype.is_complex:
        tolerance = TOLERANCE.get(dtype, 1e-13) * size
        np.testing.assert_allclose(result.astype(expected.dtype), expected, rtol=tolerance)
    else:
        np.testing.assert_array_equal(result, expected)


def reduce_all(
    world: ThreadWorld, algorithm: str, inputs: list[np.ndarray], dtype: DType, op: ReduceOp, scale: float
) -> list[np.ndarray]:
    def main(communicator: Communicator) -> np.ndarray:
        data = inputs[communicator.rank].copy()
        ALGORITHMS[algorithm](
            communicator, Buffer.of(data).cast(dtype) if data.size else Buffer(0, 0, dtype), op=op, scale=scale
        )
        return data

    return world.run(main)


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equals_numpy_for_every_dtype_reduction_and_count(algorithm: str, size: int) -> None:
    # How elements are added up is the same for every number of ranks; what goes where depends on that alone.
    dtypes = DType if size in (2, 3) else (DType.FLOAT32, DType.BFLOAT16, DType.INT64)
    with ThreadWorld(size) as world:
        for dtype in dtypes:
            for op in ReduceOp:
                if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
                    continue
                for count in COUNTS:
                    inputs = make_inputs(dtype, op, size, count)
                    results = reduce_all(world, algorithm, inputs, dtype, op, 1.0)
                    expected = expected_result(inputs, dtype, op, 1.0)
                    for result in results:
                        assert_result(result, expected, dtype, size)
                        assert result.tobytes() == results[0].tobytes()  # the same bits on every rank


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_scales_the_result_once(algorithm: str, dtype: DType) -> None:
    for size in (1, 3, 4):
        with ThreadWorld(size) as world:
            for count in (1, 7, 64):
                inputs = make_inputs(dtype, ReduceOp.SUM, size, count)
                for result in reduce_all(world, algorithm, inputs, dtype, ReduceOp.SUM, 0.25):
                    assert_result(result, expected_result(inputs, dtype, ReduceOp.SUM, 0.25), dtype, size)


def test_integers_are_truncated_toward_zero_when_scaled() -> None:
    with ThreadWorld(2) as world:
        inputs = [np.array([-3, 3, 5], np.int32), np.array([-4, 4, 6], np.int32)]
        for result in reduce_all(world, "ring", inputs, DType.INT32, ReduceOp.SUM, 0.5):
            assert result.tolist() == [-3, 3, 5]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_infinities_and_nans_of_16_bit_floats_survive(algorithm: str) -> None:
    row = np.array([np.inf, -np.inf, np.nan, 65504.0, 1.0], np.float32)
    with ThreadWorld(3) as world:
        half = reduce_all(world, algorithm, [row.astype(np.float16)] * 3, DType.FLOAT16, ReduceOp.SUM, 1.0)[0]
        brain = reduce_all(world, algorithm, [to_bfloat16(row)] * 3, DType.BFLOAT16, ReduceOp.SUM, 1.0)[0]
    np.testing.assert_array_equal(half, np.array([np.inf, -np.inf, np.nan, np.inf, 3.0], np.float16))
    np.testing.assert_array_equal(from_bfloat16(brain)[[0, 1, 2, 4]], [np.inf, -np.inf, np.nan, 3.0])


def test_ring_and_butterfly_send_no_more_than_twice_the_data() -> None:
    def bytes_sent(algorithm: str) -> int:
        def main(communicator: Communicator) -> int:
            recorder = RecordingCommunicator(communicator)
            buffer = Buffer.allocate(8 * 128, DType.FLOAT32)
            ALGORITHMS[algorithm](recorder, buffer, op=ReduceOp.SUM, scale=1.0)
            return sum(record.nbytes for record in recorder.records if record.operation == "send")

        with ThreadWorld(8) as world:
            return max(world.run(main))

    data_bytes = 8 * 128 * 4
    assert bytes_sent("ring") == bytes_sent("butterfly") == 2 * 7 * data_bytes // 8
    assert bytes_sent("naive") == 7 * data_bytes
    assert bytes_sent("tree") == 3 * data_bytes


def test_names_are_those_of_the_command_line() -> None:
    assert set(ALGORITHMS) == {"naive", "ring", "tree", "butterfly"}


def test_numpy_is_not_imported_with_the_names() -> None:
    code = "import sys; from unidist.algorithms import ALGORITHMS; print('numpy' in sys.modules, len(ALGORITHMS))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.split() == ["False", "4"]


def test_complex_minimum_is_refused_before_anything_is_sent() -> None:
    def main(communicator: Communicator) -> None:
        buffer = Buffer.allocate(2, DType.COMPLEX64)
        with pytest.raises(UsageError, match="no order"):
            communicator.allreduce(buffer, buffer, op=ReduceOp.MIN)

    with ThreadWorld(2) as world:
        world.run(main)


def test_unknown_algorithm_lists_the_choices() -> None:
    def main(communicator: Communicator) -> None:
        communicator.algorithm = "rings"  # type: ignore[attr-defined]
        buffer = Buffer.allocate(1, DType.INT8)
        with pytest.raises(ConfigurationError, match=r"Did you mean 'ring'\?.*butterfly, naive, ring, tree"):
            communicator.allreduce(buffer, buffer)

    with ThreadWorld(1) as world:
        world.run(main)
