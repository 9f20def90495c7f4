"""State that other ranks hold in memory, as `KeepsState.load` reads it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from typing_extensions import override

from unidist.buffer import Buffer, copy
from unidist.checkpoint.format.interface import SavedSection
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import TensorInfo
from unidist.checkpoint.format.reader import FIT, Convert, match, read_as
from unidist.checkpoint.transfers import Wanted
from unidist.errors import CheckpointError

_log = logging.getLogger("unidist")


class FetchedSection(SavedSection):
    """A section of state that ranks hold.

    Reading may not communicate. So what is read has to be fetched before, and given. As long as nothing was given, a
    read is noted, and leaves its target as it is.

    Args:
        name: of the section.
        tensors: every tensor of it, by name.
        values: its plain values, of all ranks.
        convert: converts types.
        what: the section, for messages.
        advice: what can be done if it does not fit, for messages.
        report: warns of what differs where that is allowed.

    Attributes:
        wanted: what was read before anything was given.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, TensorInfo],
        values: dict[str, Any],
        convert: Convert | None,
        *,
        what: str,
        advice: str = FIT,
        report: Callable[[str], None] = _log.warning,
    ) -> None:
        self.values = values
        self.wanted: dict[Wanted, TensorInfo] = {}
        self._name = name
        self._tensors = tensors
        self._convert = convert
        self._what = what
        self._advice = advice
        self._report = report
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
                f"{target.count} elements; {self._what} has {info or 'no such tensor'}"
            )
        if not part.count:
            return
        wanted = (self._name, name, part)
        if self._fetched is None:
            self.wanted[wanted] = info
            return
        found = self._fetched.get(wanted)
        if found is None:
            raise CheckpointError(f"{self._what}: {part} of {info} is read, and is no piece of the state that reads it")
        read_as(info, target, lambda raw: copy(found, raw), self._convert)

    @override
    def match(self, wanted: Collection[TensorInfo], *, strict: bool = True) -> list[TensorInfo]:
        return match(
            self._what,
            self._tensors,
            wanted,
            strict=strict,
            report=self._report,
            elsewhere=self.elsewhere,
            advice=self._advice,
        )
