"""Interface of `activations` to a framework, registered as `BindingSpec("activations", FRAMEWORK, path)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from unidist_activations._blocks import ModelMember, Path


class ModelBinding(ABC):
    """Recomputation and offload for one framework. Made without arguments, once per call of `distribute`.

    Attributes:
        separator: between the names of a path, as the framework writes it.
    """

    separator: ClassVar[str]

    @abstractmethod
    def members(self, model: Any) -> Sequence[ModelMember]:
        """Return every part of the model but itself, outer ones before inner ones. Imports nothing new."""

    @abstractmethod
    def recompute(self, model: Any, blocks: Sequence[Path]) -> None:
        """Make the parts at these paths keep their inputs only; calling it again replaces the earlier change."""

    @abstractmethod
    def offload(self, model: Any, blocks: Sequence[Path], *, path: str | None, rank: int) -> None:
        """Keep the saved tensors of the parts at these paths elsewhere.

        Args:
            model: the model.
            blocks: what `find_blocks` gave.
            path: a folder for files, or None for host memory.
            rank: for messages.

        Raises:
            ConfigurationError: the framework or the device cannot do this; says what to use.
        """
