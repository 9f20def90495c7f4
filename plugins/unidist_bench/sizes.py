"""The sizes of a run: what the command line says, and the rows that follow from it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from unidist.errors import ConfigurationError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?B?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_MOST_ROWS = 1000


def parse_bytes(text: str) -> int | None:
    """Return the bytes that `text` names; None if it names none.

    As in nccl-tests, K, M, G and T are powers of 1024, and so are KiB, MiB and the others; KB, MB and the others are
    powers of 1000.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    base = 1000 if found[2] and found[3].upper() == "B" else 1024
    if found[3].upper() == "I":
        return None
    size = float(found[1]) * base ** _POWERS[found[2].upper()]
    return int(size) if size.is_integer() else None


@dataclass(frozen=True)
class Sizes:
    """A range of sizes, in bytes, from `smallest` to `largest`.

    Args:
        smallest: first size, above 0.
        largest: no size is above it.
        factor: each size is so many times the one before; above 1.
        step: each size is so many bytes above the one before; None: `factor` says it.

    Raises:
        ConfigurationError: the range is empty, or does not advance, or has too many sizes.
    """

    smallest: int
    largest: int
    factor: float = 2.0
    step: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.smallest < 1:
            raise ConfigurationError(f"--min-bytes {self.smallest}: give a size above 0")
        if self.smallest > self.largest:
            raise ConfigurationError(
                f"--min-bytes {self.smallest} is above --max-bytes {self.largest}; there is no size between them"
            )
        if self.step is None and not self.factor > 1:
            raise ConfigurationError(f"--factor {self.factor:g}: sizes grow by it; give a number above 1")
        if self.step is not None and self.step < 1:
            raise ConfigurationError(f"--step-bytes {self.step}: give a size above 0")
        if len(self._bytes()) > _MOST_ROWS:
            raise ConfigurationError(
                f"--min-bytes {self.smallest} to --max-bytes {self.largest} are more than {_MOST_ROWS} sizes; give a "
                "larger --factor or --step-bytes"
            )

    def counts(self, itemsize: int, pieces: int) -> list[int]:
        """Return the numbers of elements, ascending and each once.

        Args:
            itemsize: bytes of an element.
            pieces: the number of elements is a multiple of this, rounded down, but at least one for each piece.
        """
        unit = itemsize * pieces
        return list(dict.fromkeys(max(1, size // unit) * pieces for size in self._bytes()))

    def _bytes(self) -> list[int]:
        found: list[int] = []
        size = self.smallest
        while size <= self.largest and len(found) <= _MOST_ROWS:
            found.append(size)
            size = size + self.step if self.step is not None else max(size + 1, int(size * self.factor))
        return found
