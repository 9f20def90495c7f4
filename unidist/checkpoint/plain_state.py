"""A script's own values as the part of a checkpoint: readable where JSON has them, else pickled."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
from typing_extensions import override

from unidist.checkpoint.format.interface import KeepsState, Plain, SavedSection
from unidist.checkpoint.format.pieces import Piece
from unidist.errors import CheckpointError

_PICKLED = "pickled\0"  # the key of a dict that stands for another value; no script has it by accident


class PlainState(KeepsState):
    """Values by name, which are equal on every rank: rank 0's are saved.

    Args:
        get: returns them; anything that cloudpickle can pickle.
        put: takes them.
        is_writer: this is rank 0.
    """

    def __init__(
        self, get: Callable[[], Mapping[str, Any]], put: Callable[[dict[str, Any]], object], *, is_writer: bool
    ) -> None:
        self._get = get
        self._put = put
        self._is_writer = is_writer

    @override
    def pieces(self) -> Sequence[Piece]:
        """Return no pieces: there are only plain values."""
        return ()

    @override
    def values(self) -> dict[str, Plain]:
        return {name: encoded(value) for name, value in self._get().items()} if self._is_writer else {}

    @override
    def check(self, section: SavedSection, *, strict: bool) -> None:
        """Raise CheckpointError if `strict` and the saved names are not those of this state."""
        saved, present = sorted(section.values), sorted(self._get())
        if saved != present and strict:
            raise CheckpointError(
                f"values that were saved: {', '.join(saved) or 'none'}; values of this state: "
                f"{', '.join(present) or 'none'}. Begin with the same ones, or with another folder"
            )

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        self._put({name: decoded(value) for name, value in section.values.items()})


def encoded(value: Any) -> Plain:
    """Return a value as JSON gives it back without a change; of what JSON does not have, its pickle."""
    if _is_plain(value):
        plain: Plain = value
        return plain
    return {_PICKLED: base64.b64encode(cloudpickle.dumps(value)).decode("ascii")}


def decoded(value: Plain) -> Any:
    """Return what was given to `encoded`."""
    if isinstance(value, dict) and _PICKLED in value:
        return pickle.loads(base64.b64decode(str(value[_PICKLED])))
    return value


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in (type(None), bool, int, float, str):
        return True
    if kind is list:
        return all(map(_is_plain, value))
    return kind is dict and all(type(key) is str and key != _PICKLED and _is_plain(item) for key, item in value.items())
