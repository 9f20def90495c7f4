"""The values that a script saves besides models and optimizers: plain values, which may contain tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from unidist.buffer import Buffer
from unidist.checkpoint.format.interface import KeepsState, Plain, SavedSection
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece
from unidist.errors import UsageError
from unidist.framework import Framework

SECTION = "extra"
_TENSOR = "tensor\0"  # the key of a dict that stands for a tensor; no script has it by accident


class Extra(KeepsState):
    """Values of a script: `{"epoch": 3, "mean": tensor, "history": [...]}`, nested as one likes.

    Args:
        framework: knows tensors.
        piece: makes a piece of a whole tensor: `(name, tensor) -> Piece`.
        values: to be saved; of rank 0, where they are written. To load, leave it out and take `loaded` afterwards.
        is_writer: this is rank 0.

    Attributes:
        loaded: what was loaded.
    """

    def __init__(
        self,
        framework: Framework,
        piece: Callable[[str, Any], Piece],
        values: Mapping[str, Any] | None = None,
        *,
        is_writer: bool = True,
    ) -> None:
        self._framework = framework
        self._piece = piece
        self._tensors: dict[str, Any] = {}
        self._plain: dict[str, Any] = {}
        self.loaded: dict[str, Any] = {}
        if values is not None and is_writer:
            self._plain = {key: self._taken(value, key) for key, value in values.items()}

    @override
    def pieces(self) -> Sequence[Piece]:
        return [self._piece(name, tensor) for name, tensor in self._tensors.items()]

    @override
    def values(self) -> dict[str, Plain]:
        return self._plain

    @override
    def check(self, section: SavedSection, *, strict: bool) -> None:
        """Accept every section: all that was saved can be loaded."""

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        """Load the values into `loaded`."""
        self.loaded = {key: self._given(value, section) for key, value in section.values.items()}

    def _taken(self, value: Any, path: str) -> Any:
        if self._framework.is_tensor(value):
            while path in self._tensors:  # a key with a dot in it may look like a nested one
                path += "_"
            self._tensors[path] = value
            return {_TENSOR: path}
        if isinstance(value, Mapping):
            if any(not isinstance(key, str) or key == _TENSOR for key in value):
                raise UsageError(f"extra: the keys of {path!r} are not all texts: {list(value)}")
            return {key: self._taken(item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._taken(item, f"{path}.{position}") for position, item in enumerate(value)]
        return value

    def _given(self, value: Any, section: SavedSection) -> Any:
        if isinstance(value, dict):
            if _TENSOR in value:
                info = section.tensors[value[_TENSOR]]
                memory = Buffer.allocate(info.count, info.dtype)
                section.read(info.name, Part.whole(info.shape), memory)
                return self._framework.tensor(memory, info.shape)
            return {key: self._given(item, section) for key, item in value.items()}
        if isinstance(value, list):
            return [self._given(item, section) for item in value]
        return value
