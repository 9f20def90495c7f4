"""Keys of the random numbers by which updates are rounded, see `unidist.gradients.precision.Rounding`. Pure.

The random number of an element is a hash of its index, and of a key for its parameter, its step and its use. So every
rank that rounds it gets the same result.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

HASH_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
"""2^32 divided by the golden ratio, and the factors of MurmurHash3's last step (Appleby 2008)."""


class RoundingKey(NamedTuple):
    """What the random numbers of some elements are made of, besides their index.

    Attributes:
        first: two numbers of 32 bits.
        second: likewise.
    """

    first: int
    second: int

    @classmethod
    def of(cls, *names: object) -> RoundingKey:
        """Return the key for something with these names and numbers; the same in every process."""
        digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))
