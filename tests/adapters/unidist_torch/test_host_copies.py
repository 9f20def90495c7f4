"""Copies to host memory. On a device: tests/parallel/test_simulated_devices.py."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the adapter is PyTorch's")

from unidist_torch.host_copies import HostCopy  # noqa: E402 - after the check for torch


def test_a_copy_has_the_values_and_the_memory_order() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    copied = HostCopy(image).wait()
    assert torch.equal(copied, image)
    assert copied.data_ptr() != image.data_ptr()
    assert copied.stride() == image.stride()
