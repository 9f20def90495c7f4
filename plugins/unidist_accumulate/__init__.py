"""The strategy `accumulate`: several backward passes make one update.

`plugin` registers it, `strategy` defines it; the core adds up the gradients. No framework is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_accumulate.strategy import Accumulate

__all__ = [
    "Accumulate",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "strategy": "Accumulate",
    },
)
