"""Compression to 16 bits: what travels, and what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unidist.buffer import Buffer, DType
from unidist.builtin.half import BFloat16, Float16
from unidist.communicator import Communicator
from unidist.gradients.allreduce import AllReduceExchange
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.compression import GradientCompressor
from unidist.gradients.interface import NOTICE_BYTES
from unidist.gradients.options import ExchangeOptions
from unidist.testing import RecordingCommunicator, ThreadWorld


class TorchlessFramework:
    """Converts between float32, float64 and the 16-bit types as hardware does."""

    def zero(self, buffer: Buffer) -> None:
        buffer.bytes()[:] = bytes(buffer.nbytes)

    def convert(self, source: Buffer, target: Buffer) -> None:
        with np.errstate(over="ignore"):
            _write(target, _read(source))


def _read(buffer: Buffer) -> np.ndarray[Any, np.dtype[Any]]:
    if buffer.dtype is DType.BFLOAT16:
        return (np.frombuffer(buffer.bytes(), np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(buffer.bytes(), buffer.dtype.value)


def _write(buffer: Buffer, values: np.ndarray[Any, np.dtype[Any]]) -> None:
    if buffer.dtype is DType.BFLOAT16:
        bits = values.astype(np.float32).view(np.uint32)
        np.frombuffer(buffer.bytes(), np.uint16)[:] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return
    np.frombuffer(buffer.bytes(), buffer.dtype.value)[:] = values


def exchange(compressor: GradientCompressor, dtype: DType, value: float) -> list[tuple[list[int], float]]:
    """Return the sizes of what travels and the mean over two ranks, of which the second has twice the value."""

    def main(communicator: Communicator) -> tuple[list[int], float]:
        recorder = RecordingCommunicator(communicator)
        framework: Any = TorchlessFramework()
        made = AllReduceExchange(
            [ParameterInfo("a", (32,), dtype)],
            framework=framework,
            host=recorder,
            options=ExchangeOptions(compressor=compressor),
        )
        made.scale = 0.5
        _write(made.buffer(0), np.full(32, value * (1 + communicator.rank)))
        made.ready(0)
        made.finish()
        return [record.nbytes for record in recorder.records], float(_read(made.buffer(0))[0])

    with ThreadWorld(2) as world:
        return world.run(main)


@pytest.mark.parametrize("compressor", [Float16(), BFloat16()])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64])
def test_wide_numbers_travel_in_16_bits(compressor: GradientCompressor, dtype: DType) -> None:
    assert exchange(compressor, dtype, 2.0) == [([64, 1 + NOTICE_BYTES], 3.0)] * 2


@pytest.mark.parametrize(("compressor", "error"), [(Float16(), 2**-10), (BFloat16(), 2**-7)])
def test_they_are_rounded_within_the_types_precision(compressor: GradientCompressor, error: float) -> None:
    for _, found in exchange(compressor, DType.FLOAT64, 0.1):
        assert found != pytest.approx(0.15, rel=1e-6)
        assert found == pytest.approx(0.15, rel=error)


def test_too_large_for_float16_shows_as_infinite_and_fits_into_bfloat16() -> None:
    assert [found for _, found in exchange(Float16(), DType.FLOAT32, 1e6)] == [float("inf")] * 2
    assert exchange(BFloat16(), DType.FLOAT32, 2.0**20)[0][1] == 1.5 * 2**20


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.INT32])
def test_what_is_16_bits_or_no_floating_point_travels_as_it_is(dtype: DType) -> None:
    (sizes, found), _ = exchange(Float16(), dtype, 2.0)
    assert sizes == [32 * dtype.itemsize, 1 + NOTICE_BYTES]
    assert found == 3.0
