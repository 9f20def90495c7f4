"""The strategy `accumulate`: several backward passes make one update.

`plugin` registers it, `strategy` defines it; the core adds up the gradients. No framework is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidist_accumulate.strategy import Accumulate

__all__ = ["Accumulate"]


def __getattr__(name: str) -> object:
    if name == "Accumulate":
        from unidist_accumulate.strategy import Accumulate

        return Accumulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
