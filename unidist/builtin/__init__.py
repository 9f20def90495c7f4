"""The core's own plugin: its engines, the strategies `data` and `identity`, and compression to 16 bits.

`plugin` is named by an entry point. Imports all folders below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.builtin.data import DataParallel
    from unidist.builtin.half import BFloat16, Float16
    from unidist.builtin.identity import Identity
    from unidist.builtin.uncompressed import NoCompression

__all__ = [
    "BFloat16", "DataParallel", "Float16", "Identity", "NoCompression",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "data": "DataParallel",
        "half": "BFloat16 Float16",
        "identity": "Identity",
        "uncompressed": "NoCompression",
    },
)
