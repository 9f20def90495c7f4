"""Digests of the values of inputs, by which ranks that were given different data are noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from unidist_torch.host_copies import HostCopy

_MOST_ELEMENTS = 1024
"""Of a tensor, that are looked at."""


class InputValues:
    """The values of a step's inputs and targets, or some of them.

    The host does not wait for those on a device before it queues the step: their digest is known when the device has
    come to the beginning of the step.
    """

    def __init__(self) -> None:
        self._on_device: list[torch.Tensor] = []

    def digest(self, tensor: torch.Tensor) -> str:
        """Return a digest of a dense tensor in words; of one on a device only that `on_device` has it."""
        flat = tensor.detach().reshape(-1)
        step = -(-flat.numel() // _MOST_ELEMENTS) | 1  # odd: an even one could meet the same column of each row
        sample = flat[::step].contiguous().view(torch.uint8)
        if sample.is_cpu:
            return f"digest {_hash(sample)}"
        self._on_device.append(sample)
        return f"on {tensor.device.type}"

    def on_device(self) -> Callable[[], str] | None:
        """Start to copy the values on a device; return what waits for them and tells their digest. None: all known."""
        if not self._on_device:
            return None
        copied = HostCopy(torch.cat(self._on_device))
        return lambda: f"inputs and targets on the device with the digest {_hash(copied.wait())}"


def _hash(sample: torch.Tensor) -> str:
    return hashlib.blake2b(sample.numpy().tobytes(), digest_size=8).hexdigest()
