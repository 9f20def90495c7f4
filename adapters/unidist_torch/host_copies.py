"""Copies between a device and host memory on a separate stream."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["HostCopy", "copying", "pins"]


class HostCopy:
    """A copy of a tensor to host memory, pinned if possible; torch keeps such memory for the next one.

    From a CUDA device it is copied on a separate stream, after what is queued now. Several copies follow each other
    without the host, which computes on the first one meanwhile.

    Args:
        tensor: must not be written to before `wait` has returned.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._made = torch.empty_like(tensor, device="cpu", pin_memory=pins())
        self._copied: torch.cuda.Event | None = None
        with copying(tensor.device) as stream:
            self._made.copy_(tensor, non_blocking=stream is not None)
        if stream is not None:
            tensor.record_stream(stream)  # the allocator gives its memory to nobody before it is copied
            self._copied = stream.record_event()

    def wait(self) -> torch.Tensor:
        """Return the copy when it is complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._made


@contextmanager
def copying(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Queue copies on a separate stream, after what is queued now. What is queued next does not wait for them.

    Yields:
        The stream; None for a device without streams.
    """
    if device.type != "cuda":
        yield None
        return
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def pins() -> bool:
    """Return whether host memory is to be pinned, so that a device copies from it and to it by itself."""
    return torch.cuda.is_available()
