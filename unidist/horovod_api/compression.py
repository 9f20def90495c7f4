"""Compression of single tensors around an operation, with Horovod's interface; adapters add what knows a framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Compressor(ABC):
    """Compresses a tensor before it is reduced, and brings the result back. Without state, and never instantiated."""

    @staticmethod
    @abstractmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what is reduced instead of `tensor`, and what `decompress` needs."""

    @staticmethod
    @abstractmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the result in the form of the original tensor."""


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor itself."""
        return tensor
