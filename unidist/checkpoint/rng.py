"""The random number generators of Python and numpy, as plain values; each rank has its own."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from unidist.checkpoint.format.interface import KeepsState, Plain, SavedSection
from unidist.checkpoint.format.pieces import Piece

SECTION = "rng"


class RandomState(KeepsState):
    """The generators of Python and numpy of one rank; adapters add their framework's as tensors.

    A rank that the checkpoint does not know (there are more ranks than when it was saved) keeps its generators as
    they are.

    Args:
        rank: of this process, in the world.
    """

    def __init__(self, rank: int) -> None:
        self._rank = str(rank)

    def tensors(self) -> Sequence[Piece]:
        """Return the generators of the framework, each under a name of `name`."""
        return ()

    def set_tensor(self, generator: str, section: SavedSection, name: str) -> None:
        """Set one of the framework's generators to what the section has under `name`."""

    def name(self, generator: str) -> str:
        """Return the name of this rank's state of a generator."""
        return f"{generator}@{self._rank}"

    @override
    def pieces(self) -> Sequence[Piece]:
        return self.tensors()

    @override
    def values(self) -> dict[str, Plain]:
        version, numbers, gauss = random.getstate()
        own: dict[str, Any] = {"python": [version, list(numbers), gauss]}
        if "numpy" in sys.modules:
            import numpy as np

            kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
            own["numpy"] = [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
        return {"ranks": {self._rank: own}}

    @override
    def check(self, section: SavedSection, *, strict: bool) -> None:
        """Accept every section: generators that this process does not have are left out."""

    @override
    def load(self, section: SavedSection, *, strict: bool) -> None:
        own = section.values.get("ranks", {}).get(self._rank)
        if own is None:
            return
        version, numbers, gauss = own["python"]
        random.setstate((version, tuple(numbers), gauss))
        if "numpy" in own and "numpy" in sys.modules:
            import numpy as np

            kind, keys, *rest = own["numpy"]
            np.random.set_state((kind, np.array(keys, np.uint32), *rest))
        for name in section.tensors:
            generator, _, rank = name.rpartition("@")
            if rank == self._rank:
                self.set_tensor(generator, section, name)
