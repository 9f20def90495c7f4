"""What the strategy `activations` asks of its binding to a framework: `BindingSpec("activations", FRAMEWORK, path)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from unidist_activations._blocks import Member, Path


class ModelBinding(ABC):
    """Recomputation and offload for one framework. Made without arguments, once per call of `distribute`.

    Attributes:
        separator: between the names of a path, as the framework writes it.
    """

    separator: ClassVar[str]

    @abstractmethod
    def members(self, model: Any) -> Sequence[Member]:
        """Return every part of the model but itself, outer ones before inner ones. Imports nothing new."""

    @abstractmethod
    def recompute(self, model: Any, blocks: Sequence[Path]) -> None:
        """Have the parts at these paths keep their inputs only; called again, it replaces what it did before."""

    @abstractmethod
    def offload(self, model: Any, blocks: Sequence[Path], *, path: str | None, rank: int) -> None:
        """Have what the parts at these paths keep be kept elsewhere.

        Args:
            model: the model.
            blocks: what `find_blocks` gave.
            path: a folder for files, or None for host memory.
            rank: for messages.

        Raises:
            ConfigurationError: the framework or the device cannot do this; says what to use.
        """
