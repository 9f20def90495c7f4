"""Host memory that stands for an accelerator's, on machines without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unidist_zero._torch.parameters.offload import HostStateMemory


@contextmanager
def host_as_accelerator() -> Iterator[None]:
    """Let `offload=host` take this machine's memory for an accelerator's: every copy is made, from host to host."""
    plain = HostStateMemory.is_away

    def is_away(self: HostStateMemory, tensor: torch.Tensor) -> bool:
        return True

    HostStateMemory.is_away = is_away  # type: ignore[method-assign]  # for a while
    try:
        yield
    finally:
        HostStateMemory.is_away = plain  # type: ignore[method-assign]
