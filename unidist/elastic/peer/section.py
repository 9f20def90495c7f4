"""State that other ranks hold in memory, as `KeepsState.load` reads it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from typing_extensions import override

from unidist.buffer import Buffer, copy
from unidist.checkpoint.format.interface import SavedSection
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import TensorInfo
from unidist.checkpoint.format.reader import Convert, match, read_as
from unidist.elastic.peer.transfers import Wanted
from unidist.errors import CheckpointError

_log = logging.getLogger("unidist.elastic")


class PeerSection(SavedSection):
    """A section of a committed state.

    It is read twice, because reading may not communicate: the first time it notes what is read, and leaves the targets
    as they are; when that has been fetched it is given.

    Args:
        name: of the section.
        tensors: every tensor of it, by name.
        values: its plain values, of all ranks.
        convert: converts types.

    Attributes:
        wanted: what was read.
    """

    def __init__(
        self, name: str, tensors: Mapping[str, TensorInfo], values: dict[str, Any], convert: Convert | None
    ) -> None:
        self.values = values
        self.wanted: dict[Wanted, TensorInfo] = {}
        self._name = name
        self._tensors = tensors
        self._convert = convert
        self._fetched: Mapping[Wanted, Buffer] | None = None

    @property
    @override
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def give(self, fetched: Mapping[Wanted, Buffer]) -> None:
        """Let what was wanted be read from here from now on."""
        self._fetched = fetched

    @override
    def read(self, name: str, part: Part, target: Buffer) -> None:
        info = self._tensors.get(name)
        if info is None or not part.fits(info.shape) or target.count != part.count:
            raise CheckpointError(
                f"{part.count} elements of the box {part.box} of {name!r} were asked for, to be put into "
                f"{target.count} elements; section {self._name!r} of the committed state has {info or 'no such tensor'}"
            )
        wanted = (self._name, name, part)
        if self._fetched is None:
            self.wanted[wanted] = info
            return
        found = self._fetched[wanted]
        read_as(info, target, lambda raw: copy(found, raw), self._convert)

    @override
    def match(self, wanted: Collection[TensorInfo], *, strict: bool = True) -> list[TensorInfo]:
        what = f"section {self._name!r} of the committed state"
        return match(what, self._tensors, wanted, strict=strict, report=_log.warning, elsewhere=self.elsewhere)
