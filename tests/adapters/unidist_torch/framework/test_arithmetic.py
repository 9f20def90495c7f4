"""Norms and clamping of flat memory in PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unidist.buffer import Buffer, DType
from unidist_torch.framework import TorchFramework
from unidist_torch.framework.arithmetic import norms_on_device

VALUES = np.random.default_rng(0).standard_normal(200_001)


def norm(values: Any, order: float) -> float:
    return TorchFramework().norm(Buffer.of(values), order)


@pytest.mark.parametrize("order", [0.5, 1, 2, 3, math.inf])
@pytest.mark.parametrize(("dtype", "error"), [("float64", 1e-13), ("float32", 1e-6), ("float16", 1e-6)])
def test_norms_of_long_memory_are_as_exact_as_its_type(order: float, dtype: str, error: float) -> None:
    values = VALUES.astype(dtype)
    assert norm(values, order) == pytest.approx(np.linalg.norm(values.astype("float64"), order), rel=error)


def test_what_is_large_does_not_overflow_on_the_way() -> None:
    assert norm(np.full(3, 1e30, "float32"), 2.0) == pytest.approx(math.sqrt(3) * 1e30, rel=1e-6)
    assert norm(np.full(3, 6e4, "float16"), 2.0) == pytest.approx(math.sqrt(3) * np.float64(np.float16(6e4)), rel=1e-6)


@pytest.mark.parametrize("order", [0.5, 2, math.inf])
def test_norms_on_a_device_are_read_at_once(order: float) -> None:
    class Counts(TorchDispatchMode):
        reads = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counts.reads += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
            return function(*args, **(kwargs or {}))

    parts = [VALUES[:7].astype("float16"), VALUES.astype("float32"), VALUES[:3] + 1j]
    tensors = [torch.from_numpy(part) for part in parts]
    with Counts():
        found = norms_on_device(tensors, order)
    assert Counts.reads == 0, "a copy to the host is the only wait"
    assert found == pytest.approx([np.linalg.norm(part.astype("complex128"), order) for part in parts], rel=1e-12)
    buffers = [Buffer.of(part) for part in parts[:2]]
    assert TorchFramework().norms(buffers, order) == [TorchFramework().norm(each, order) for each in buffers]


@pytest.mark.parametrize("order", [1, 2, 3, math.inf])
def test_what_is_not_finite_shows(order: float) -> None:
    for bad, is_shown in ((math.inf, math.isinf), (-math.inf, math.isinf), (math.nan, math.isnan)):
        values = np.ones(100_000, "float32")
        values[70_000] = bad
        assert is_shown(norm(values, order))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_clamping_keeps_what_is_inside_and_takes_limits_beyond_the_type(dtype: str) -> None:
    values = np.array([-3.0, -0.5, 0.25, 7.0], dtype)
    TorchFramework().clamp(Buffer.of(values), 1e30)
    assert values.tolist() == [-3.0, -0.5, 0.25, 7.0]
    TorchFramework().clamp(Buffer.of(values), 0.5)
    assert values.tolist() == [-0.5, -0.5, 0.25, 0.5]


def test_bfloat16_is_known_too() -> None:
    values = np.array([0x4040, 0x4080], "uint16")  # 3 and 4
    assert TorchFramework().norm(Buffer.of(values).cast(DType.BFLOAT16), 2.0) == 5.0
